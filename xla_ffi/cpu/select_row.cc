#include "cpu/select_row.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace sfpo {
namespace {

// Long enough to be worth a claim, short enough to be shared out evenly.
constexpr int64_t kChunkBlocks = 16;
// The share of a row that a bracket may hold: several times what the sample leads to expect.
constexpr int64_t kRoom = 8;
constexpr int64_t kLanePadding = 16;
constexpr int64_t kAhead = 32;

}  // namespace

void select_short_row(const KeySource& row, int64_t count, Selected to) {
  int32_t keys[kBlockEntries];
  int64_t live = row.live == nullptr ? row.size : count_live(row.live, row.size);
  *to.end = static_cast<uint32_t>(row.size);
  *to.threshold = count >= live ? 0 : kKeepNothing;
  if (count == 0 || count >= live) return;
  make_keys(row, 0, row.size, keys);
  int32_t low, high;
  key_range(keys, row.size, &low, &high);
  int32_t threshold = kth_largest(keys, row.size, count, low, high);
  int64_t missing = count - count_above(keys, row.size, threshold);
  *to.threshold = static_cast<uint32_t>(threshold);
  // The end of the row, too, where no tie is left out.
  *to.end = static_cast<uint32_t>(find_equal(keys, row.size, threshold, missing));
}

void LongRow::start() {
  int64_t live = row_.live == nullptr ? row_.size : count_live(row_.live, row_.size);
  if (k_ >= live) return write(0, row_.size);
  if (k_ == 0) return write(kKeepNothing, row_.size);
  int64_t blocks = (row_.size + kBlockEntries - 1) / kBlockEntries;
  chunks_ = (blocks + kChunkBlocks - 1) / kChunkBlocks;
  blocks_.resize(blocks);
  // Without memory there is no room, and the digits decide.
  int64_t room = row_.size / kRoom;
  within_.reset(new (std::nothrow) int32_t[room + kLanePadding]);
  capacity_ = within_ == nullptr ? 0 : room;

  int bits = sample_bits(row_.size);
  int64_t samples = int64_t{1} << bits, found = 0;
  std::unique_ptr<int32_t[]> sample(new (std::nothrow) int32_t[samples + kLanePadding]);
  for (int64_t i = 0; i < samples && sample != nullptr; ++i) {
    // Nearly each is a cache line of its own, far from the last one.
    int64_t ahead = sample_position(std::min(i + kAhead, samples - 1), bits, row_.size);
    __builtin_prefetch(static_cast<const char*>(row_.x) + ahead * row_.item);
    int32_t key = row_.key(sample_position(i, bits, row_.size));
    sample[found] = key;
    found += key >= 0;
  }
  if (found == 0) return;
  std::fill_n(sample.get() + found, kLanePadding, -1);
  int32_t least, most;
  key_range(sample.get(), found, &least, &most);
  SampleRanks ranks = sample_ranks(k_, live, found);
  if (ranks.high >= 1) high_ = kth_largest(sample.get(), found, ranks.high, least, most);
  if (ranks.low <= found) low_ = kth_largest(sample.get(), found, ranks.low, least, most);
}

void LongRow::split(int64_t chunk) {
  int32_t keys[kBlockEntries], within[kBlockEntries];
  int64_t end = std::min<int64_t>(blocks_.size(), (chunk + 1) * kChunkBlocks);
  for (int64_t i = chunk * kChunkBlocks; i < end; ++i) {
    Block& block = blocks_[i];
    make_keys(row_, i * kBlockEntries, block_entries(i), keys);
    block.counts = split_by_bracket(keys, block_entries(i), low_, high_, within);
    int64_t count = block.counts.within;
    block.offset = held_.fetch_add(count, std::memory_order_relaxed);
    if (block.offset + count <= capacity_) {
      std::memcpy(within_.get() + block.offset, within, count * sizeof within[0]);
    }
  }
}

void LongRow::finish() {
  int64_t above = 0, at_high = 0, at_low = 0, within = held_.load();
  for (const Block& block : blocks_) {
    above += block.counts.above;
    at_high += block.counts.at_high;
    at_low += block.counts.at_low;
  }
  if (low_ == high_) at_low = 0;
  if (k_ <= above) return reopen(high_ + 1, static_cast<int32_t>(kKeyMask));
  k_ -= above;
  if (k_ <= at_high) return write_ties(high_, at_high);
  k_ -= at_high;
  if (k_ > within) {
    k_ -= within;
    if (k_ <= at_low) return write_ties(low_, at_low);
    k_ -= at_low;
    return reopen(0, low_ - 1);
  }
  if (within > capacity_) return reopen(low_ + 1, high_ - 1);
  std::fill_n(within_.get() + within, kLanePadding, -1);
  int32_t threshold = kth_largest(within_.get(), within, k_, low_ + 1, high_ - 1);
  k_ -= count_above(within_.get(), within, threshold);
  write_ties(threshold, count_equal(within_.get(), within, threshold));
}

void LongRow::reopen(int32_t low, int32_t high) {
  low_ = low;
  high_ = high;
  step_ = low == high ? Step::kTies : Step::kDigits;
  bins_.reset(new std::atomic<int64_t>[kDigits]());
}

void LongRow::count(int64_t chunk) {
  int32_t keys[kBlockEntries];
  uint32_t bins[kDigits] = {};
  int shift = digit_shift(low_, high_);
  int64_t end = std::min<int64_t>(blocks_.size(), (chunk + 1) * kChunkBlocks);
  for (int64_t i = chunk * kChunkBlocks; i < end; ++i) {
    make_keys(row_, i * kBlockEntries, block_entries(i), keys);
    if (step_ == Step::kTies) {
      blocks_[i].counts.at_high = count_equal(keys, block_entries(i), high_);
    } else {
      count_digits(keys, block_entries(i), low_, high_, shift, bins);
    }
  }
  for (int64_t i = 0; step_ == Step::kDigits && i < kDigits; ++i) {
    if (bins[i] != 0) bins_[i].fetch_add(bins[i], std::memory_order_relaxed);
  }
}

void LongRow::narrow() {
  if (step_ == Step::kTies) {
    int64_t equal = 0;
    for (const Block& block : blocks_) equal += block.counts.at_high;
    return write_ties(high_, equal);
  }
  int64_t digit = kDigits - 1;
  for (; digit > 0 && k_ > bins_[digit]; --digit) k_ -= bins_[digit];
  int shift = digit_shift(low_, high_);
  int64_t first = low_ + (digit << shift);
  high_ = static_cast<int32_t>(std::min<int64_t>(high_, first + (int64_t{1} << shift) - 1));
  low_ = static_cast<int32_t>(first);
  for (int64_t i = 0; i < kDigits; ++i) bins_[i] = 0;
  if (low_ == high_) step_ = Step::kTies;
}

void LongRow::write(uint32_t threshold, int64_t end) {
  *to_.threshold = threshold;
  *to_.end = static_cast<uint32_t>(end);
  step_ = Step::kDone;
}

void LongRow::write_ties(int32_t threshold, int64_t equal) {
  int64_t missing = k_;
  if (missing == equal) return write(threshold, row_.size);
  size_t i = 0;
  for (int64_t here; missing >= (here = equal_in(blocks_[i], threshold)); ++i) missing -= here;
  int32_t keys[kBlockEntries];
  int64_t start = i * kBlockEntries;
  make_keys(row_, start, block_entries(i), keys);
  write(threshold, start + find_equal(keys, block_entries(i), threshold, missing));
}

int64_t LongRow::equal_in(const Block& block, int32_t key) const {
  if (key == high_) return block.counts.at_high;
  if (key == low_) return block.counts.at_low;
  const int32_t* keys = within_.get() + block.offset;
  return std::count(keys, keys + block.counts.within, key);
}

int64_t LongRow::block_entries(int64_t block) const {
  return std::min(kBlockEntries, row_.size - block * kBlockEntries);
}

}  // namespace sfpo
