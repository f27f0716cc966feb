/* The paged memory pool: its C interface.
 *
 * A pool reserves addresses, maps memory a page at a time when it is first needed, and gives
 * whole pages back as soon as nothing lies in them. docs/pool.md has the model and its limits.
 *
 * Every call returns a code, and never ends the process. `sfpo_pool_last_message` says, in one
 * line, what was wrong in the last call of this thread that failed. All calls on one pool may
 * be made from any thread, but for `sfpo_pool_destroy`, after which there is no pool.
 */
#ifndef SFPO_POOL_H_
#define SFPO_POOL_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define SFPO_POOL_API __attribute__((visibility("default")))
/* Of this file: what reads it through ctypes compares. */
#define SFPO_POOL_VERSION 1

typedef enum sfpo_pool_code {
  SFPO_POOL_OK = 0,
  SFPO_POOL_INVALID = 1,       /* an argument that no pool could serve */
  SFPO_POOL_OUT_OF_MEMORY = 2, /* the limit, or no room for the pool's own tables */
  SFPO_POOL_SYSTEM = 3,        /* the operating system or the driver refused */
  SFPO_POOL_DOUBLE_FREE = 4,   /* an address of the pool where no block begins */
  SFPO_POOL_FOREIGN = 5,       /* an address, or a handle, that the pool never gave */
  SFPO_POOL_DAMAGED = 6,       /* freed memory was written to (found with `poison`) */
  SFPO_POOL_BUSY = 7,          /* blocks are alive, pinned, or waiting for a stream */
  SFPO_POOL_UNAVAILABLE = 8    /* there is no such memory on this machine */
} sfpo_pool_code;

typedef enum sfpo_pool_backend { SFPO_POOL_HOST = 0, SFPO_POOL_CUDA = 1 } sfpo_pool_backend;

typedef struct sfpo_pool sfpo_pool;
typedef uint64_t sfpo_pool_handle; /* of a block that may be moved; 0 is none */

/* All sizes are in bytes. */
typedef struct sfpo_pool_options {
  uint64_t limit;        /* mapped memory at most; rounded down to whole pages */
  uint64_t page;         /* a power of two; a multiple of what the memory is given out in */
  uint64_t cache;        /* free pages that stay mapped, at most; 0: every release is immediate */
  int32_t backend;       /* sfpo_pool_backend */
  int32_t device;        /* CUDA's number of the GPU */
  int32_t poison;        /* 1: freed memory is filled, and looked at before it is used again */
  int32_t compact_every; /* compact after so many frees; 0: when asked, or out of memory */
  const char* driver;    /* the file of CUDA's driver; NULL: libcuda.so.1 */
} sfpo_pool_options;

/* All but the counts are in bytes. */
typedef struct sfpo_pool_statistics {
  uint64_t reserved;         /* addresses; they cost nothing */
  uint64_t limit;            /* mapped memory at most */
  uint64_t page;             /* a page */
  uint64_t mapped;           /* pages now mapped: those that blocks lie in, and cached ones */
  uint64_t cached;           /* mapped pages that no block lies in */
  uint64_t in_use;           /* blocks, each rounded up to the alignment; waiting ones too */
  uint64_t requested;        /* blocks, as they were asked for */
  uint64_t waiting;          /* blocks freed on a stream that has not come so far */
  uint64_t free;             /* limit - in_use */
  uint64_t largest_free;     /* the largest block that can be had now */
  uint64_t peak_mapped;      /* the most that was ever mapped */
  uint64_t peak_in_use;      /* the most that was ever in use */
  uint64_t moved;            /* copied by compactions */
  uint64_t blocks;           /* how many are alive, waiting ones included */
  uint64_t allocations;      /* calls that gave a block */
  uint64_t compactions;      /* calls that looked for something to move */
  uint64_t pages_mapped;     /* pages ever mapped anew */
  uint64_t pages_given_back; /* pages ever given back */
  uint64_t pages_moved;      /* free pages mapped at another address to lie side by side */
  uint64_t damaged;          /* writes after a free that were found */
} sfpo_pool_statistics;

SFPO_POOL_API int sfpo_pool_version(void);
SFPO_POOL_API const char* sfpo_pool_last_message(void);

/* A limit of 1 GiB, pages of 2 MiB, a cache of 64 MiB, on the host. */
SFPO_POOL_API void sfpo_pool_default_options(sfpo_pool_options* options);
/* Whether this machine has such memory; OK, UNAVAILABLE with the reason, or INVALID. */
SFPO_POOL_API int sfpo_pool_probe(const sfpo_pool_options* options);
SFPO_POOL_API int sfpo_pool_create(const sfpo_pool_options* options, sfpo_pool** pool);
/* BUSY while blocks are alive: their memory would be gone. */
SFPO_POOL_API int sfpo_pool_destroy(sfpo_pool* pool);

/* A block that stays where it is. `alignment` is a power of two up to a page; 0 is the
 * memory's own, 64 bytes on the host and 256 on a GPU. What lies in it is anything. */
SFPO_POOL_API int sfpo_pool_allocate(sfpo_pool* pool, uint64_t size, uint64_t alignment,
                                     void** block);
SFPO_POOL_API int sfpo_pool_free(sfpo_pool* pool, void* block);

/* Frees a block once all that was given to the stream before this call has run. A CUstream;
 * on the host a number of the caller's, which the two calls below move on. */
SFPO_POOL_API int sfpo_pool_free_on_stream(sfpo_pool* pool, void* block, void* stream);
SFPO_POOL_API int sfpo_pool_stream_submit(sfpo_pool* pool, void* stream);
SFPO_POOL_API int sfpo_pool_stream_complete(sfpo_pool* pool, void* stream);
/* Frees what can be, without waiting; every other call does it too. */
SFPO_POOL_API int sfpo_pool_collect(sfpo_pool* pool);
/* Waits for all streams. BUSY on the host, where nobody would move them on. */
SFPO_POOL_API int sfpo_pool_wait(sfpo_pool* pool);

/* A block that compaction may move while nobody has it pinned. A pin gives its address, which
 * holds until the unpin; pins are counted. */
SFPO_POOL_API int sfpo_pool_allocate_movable(sfpo_pool* pool, uint64_t size,
                                             sfpo_pool_handle* handle);
SFPO_POOL_API int sfpo_pool_pin(sfpo_pool* pool, sfpo_pool_handle handle, void** block);
SFPO_POOL_API int sfpo_pool_unpin(sfpo_pool* pool, sfpo_pool_handle handle);
SFPO_POOL_API int sfpo_pool_free_movable(sfpo_pool* pool, sfpo_pool_handle handle);

/* Moves movable blocks out of the emptiest pages into holes of others. */
SFPO_POOL_API int sfpo_pool_compact(sfpo_pool* pool, uint64_t* given_back);
/* Gives all cached pages back. */
SFPO_POOL_API int sfpo_pool_trim(sfpo_pool* pool);
/* With `poison`, looks at all that is free; DAMAGED with the first place. */
SFPO_POOL_API int sfpo_pool_check(sfpo_pool* pool);
SFPO_POOL_API int sfpo_pool_get_statistics(sfpo_pool* pool, sfpo_pool_statistics* statistics);

#if defined(__cplusplus)
}
#endif

#endif /* SFPO_POOL_H_ */
