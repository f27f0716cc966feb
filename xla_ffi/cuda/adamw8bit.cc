// sfpo_adamw8bit on a CUDA stream.
#include "cuda/adamw8bit.h"

#include "cuda/handler.h"
#include "operands/adamw8bit.h"

namespace sfpo {
namespace {

// The blocks of a leaf from `first` on, which begins a row.
AdamwJob job_of(const Adamw8bit& op, int64_t leaf, int64_t first) {
  const Blocks& blocks = op.blocks[leaf];
  int64_t start = blocks.start(first);
  AdamwJob job = {};
  job.g = at(op.g, leaf, start);
  job.m = at(op.m.from, leaf, start);
  job.m_scales = at(op.m_scales.from, leaf, first);
  job.v = at(op.v.from, leaf, start);
  job.v_scales = at(op.v_scales.from, leaf, first);
  job.new_m = at(op.m.to, leaf, start);
  job.new_m_scales = at(op.m_scales.to, leaf, first);
  job.new_v = at(op.v.to, leaf, start);
  job.new_v_scales = at(op.v_scales.to, leaf, first);
  job.is_narrow = leaf >= op.first_narrow;
  if (job.is_narrow) {
    job.parameters = at(op.narrow.from, leaf - op.first_narrow, start);
    job.out = at(op.narrow.to, leaf - op.first_narrow, start);
    job.rounding = op.rounding(leaf);
  } else {
    job.parameters = at(op.wide.from, leaf, start);
    job.out = op.has_parameters ? at(op.wide.to, leaf, start) : at(op.directions, leaf, start);
  }
  job.width = blocks.width;
  job.in_row = static_cast<uint32_t>(blocks.in_row);
  job.number = static_cast<uint32_t>(start);
  job.block = static_cast<int16_t>(blocks.block);
  job.is_decayed = op.is_decayed[leaf] != 0;
  return job;
}

ffi::Error run(cudaStream_t stream, const Adamw8bit& op) {
  AdamwStep step{op.numbers, op.seeds, op.taken};
  RowLauncher<AdamwJob> launcher(
      [&](const RowTable<AdamwJob>& table) { return launch_adamw8bit(table, step, stream); });
  for (size_t leaf = 0; leaf < op.blocks.size(); ++leaf) {
    int64_t in_row = op.blocks[leaf].in_row, count = op.blocks[leaf].count;
    if (in_row > kMaxRows) return invalid("`widths` must be at most 2^30 blocks on a GPU");
    if (count == 0) continue;
    int64_t most = kMaxRows / in_row * in_row;
    for (int64_t first = 0; first < count; first += most) {
      launcher.add(job_of(op, leaf, first), std::min(most, count - first));
    }
  }
  return to_error(launcher.finish());
}

}  // namespace

SFPO_DEFINE_HANDLER(sfpo_adamw8bit, (adamw8bit<cudaStream_t, run>),
                    adamw8bit_binding().Ctx<Stream>(), kTraits);

}  // namespace sfpo
