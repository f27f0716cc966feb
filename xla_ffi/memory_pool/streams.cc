// Frees in the order of streams: a block is a hole once its stream has come to the free.
#include "memory_pool/pool.h"

namespace sfpo::pool {

Code Pool::free_on_stream(void* block, void* stream) {
  Guard guard(lock_);
  uint32_t tile = kNone;
  if (Code code = find_block(block, &tile)) return code;
  settle();
  Stream* found = nullptr;
  for (Stream& one : streams_) {
    if (one.stream == stream) found = &one;
  }
  if (found == nullptr) {
    streams_.push_back({stream, {}});
    found = &streams_.back();
  }
  found->frees.push_back({tile, 0});
  Code code = pages_->record(stream, &found->frees.back().ticket);
  if (code != SFPO_POOL_OK) {
    found->frees.pop_back();
    return code;
  }
  heap_.tiles()[tile].kind = Kind::waiting;
  numbers_.waiting += heap_.tiles()[tile].size;
  return free_passed(false);
}

Code Pool::free_passed(bool is_waiting) {
  for (size_t i = streams_.size(); i-- > 0;) {
    // A stream's tickets pass in their order.
    while (!streams_[i].frees.empty()) {
      Waiting first = streams_[i].frees.front();
      bool is_passed = is_waiting;
      Code code =
          is_waiting ? pages_->wait(first.ticket) : pages_->passed(first.ticket, &is_passed);
      if (code != SFPO_POOL_OK) return code;
      if (!is_passed) break;
      streams_[i].frees.pop_front();
      numbers_.waiting -= heap_.tiles()[first.tile].size;
      table_.erase(heap_.tiles()[first.tile].offset);
      if (Code retired = retire(first.tile)) return retired;
    }
    if (streams_[i].frees.empty()) streams_.erase(streams_.begin() + static_cast<int64_t>(i));
  }
  return SFPO_POOL_OK;
}

Code Pool::collect() {
  Guard guard(lock_);
  settle();
  return free_passed(false);
}

Code Pool::wait() {
  Guard guard(lock_);
  settle();
  return free_passed(true);
}

Code Pool::submit(void* stream) {
  Guard guard(lock_);
  return pages_->submit(stream);
}

Code Pool::complete(void* stream) {
  Guard guard(lock_);
  return pages_->complete(stream);
}

}  // namespace sfpo::pool
