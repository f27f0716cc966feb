// The selection of one row: a short one at once, a long one in pieces that threads share.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/select.h"
#include "cpu/select_keys.h"

namespace sfpo {

// Where a row's selection is written.
struct Selected {
  uint32_t* threshold;
  uint32_t* end;
};

// A row of at most kBlockEntries.
void select_short_row(const KeySource& row, int64_t count, Selected to);

// A row of more: `start` it, `split` each chunk, `finish`; then, while it `is_open`, `count`
// each chunk and `narrow`. Chunks of one step may run at once, steps may not.
class LongRow {
 public:
  LongRow(const KeySource& row, int64_t count, Selected to) : row_(row), to_(to), k_(count) {}

  // Takes the sample. Afterwards `chunks` is 0 for a row that is decided already.
  void start();
  int64_t chunks() const { return chunks_; }
  void split(int64_t chunk);
  void finish();

  bool is_open() const { return step_ != Step::kDone; }
  void count(int64_t chunk);
  void narrow();

 private:
  // What else it takes: another digit of the threshold, or the place of its ties.
  enum class Step { kDigits, kTies, kDone };

  struct Block {
    BracketCounts counts;
    int64_t offset = 0;  // of what is within the bracket, among all of it
  };

  void write(uint32_t threshold, int64_t end);
  // Of `equal` keys at the threshold the first k_ are kept.
  void write_ties(int32_t threshold, int64_t equal);
  // The bracket was of no use, but it lies between these.
  void reopen(int32_t low, int32_t high);
  int64_t equal_in(const Block& block, int32_t key) const;
  int64_t block_entries(int64_t block) const;

  KeySource row_;
  Selected to_;
  int64_t k_;  // the rank that is sought, among the keys not yet known to be above it
  int64_t chunks_ = 0;
  int32_t low_ = 0;
  int32_t high_ = static_cast<int32_t>(kKeyMask);
  Step step_ = Step::kDone;
  std::vector<Block> blocks_;
  // Keys within the bracket.
  std::unique_ptr<int32_t[]> within_;
  int64_t capacity_ = 0;
  std::atomic<int64_t> held_{0};
  std::unique_ptr<std::atomic<int64_t>[]> bins_;
};

}  // namespace sfpo
