// sfpo_onebit_update on XLA's threads.
#include "operands/onebit_update.h"

#include "cpu/adam_rows.h"
#include "cpu/parallel.h"

namespace sfpo {
namespace {

ffi::Error run(ffi::ThreadPool pool, const OnebitUpdate& op) {
  const float* f = op.factors;
  AdamFactors factors{f[0], f[1], f[2], f[3], f[4], f[5]};
  std::vector<Chunk> chunks = op.layout.chunks(/*with_padding=*/false);
  parallel_for(pool, chunks.size(), op.layout.entries(), [&](int64_t i) {
    const Chunk& chunk = chunks[i];
    int64_t leaf = chunk.piece->leaf, width = op.layout.width(chunk.group);
    for (int64_t row = chunk.row; row < chunk.row + chunk.rows; ++row) {
      RowSpan span = op.layout.span(*chunk.piece, row);
      onebit_row(op.signs[chunk.group].data + row * (width / 8), op.scales[chunk.group].data[row],
                 op.variance[leaf].data + span.start, at(op.parameters, leaf, span.start),
                 op.is_decayed[leaf] != 0, span.length, width, factors,
                 op.out[leaf].data + span.start, at(op.momentum, leaf, span.start));
    }
  });
  return ffi::Error::Success();
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_onebit_update, (onebit_update<ffi::ThreadPool, run>),
                    onebit_update_binding().Ctx<ffi::ThreadPool>());

}  // namespace sfpo
