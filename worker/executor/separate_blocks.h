// Blocks of keys in separate memory.
//
// A ring's program receives each block of keys into one of two buffers, over a block that it no
// longer needs. A call that computes on several blocks at a time needs all of them.
#ifndef RINGATTN_WORKER_EXECUTOR_SEPARATE_BLOCKS_H_
#define RINGATTN_WORKER_EXECUTOR_SEPARATE_BLOCKS_H_

#include <optional>

#include "common/program/program.h"

namespace ringattn::worker {

// Returns the program with a new buffer for every received block that would overwrite keys of an
// earlier forward call. Only addresses of this rank change, so peers are unaffected. Returns
// std::nullopt if the program has none, or if it uses such a block otherwise than by sending it and
// by calls that read it as keys.
std::optional<Program> SeparateBlocks(Program program);

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_EXECUTOR_SEPARATE_BLOCKS_H_
