// HeadViews gives kernels some heads of a tensor that stores all heads. If these heads are one run
// of bytes that kernels accept, a view is that run. Otherwise it is a packed copy, made before the
// call or written back after it.
#ifndef RINGATTN_COMMON_SCHEDULE_HEAD_VIEWS_H_
#define RINGATTN_COMMON_SCHEDULE_HEAD_VIEWS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/attention/tensors.h"
#include "common/program/program.h"
#include "common/schedule/program_builder.h"

namespace ringattn {

// Layout of a tensor's heads: [outer, heads, head_bytes].
struct HeadForm {
  int64_t outer = 0;
  int64_t heads = 0;
  int64_t head_bytes = 0;
  // Kernels accept it at any multiple of its element size. Rows of heads must begin where rows may.
  bool anywhere = false;
};

// Returns the copy that gathers (to_packed) or scatters heads [begin, begin + count). `all` covers
// their bytes from the first to the last; `packed` holds only them.
ComputeCall CopyOfHeads(const HeadForm& form, int64_t begin, int64_t count, const ByteRange& all,
                        const ByteRange& packed, bool to_packed);

// Views of one rank's tensors. Not thread safe.
class HeadViews {
 public:
  explicit HeadViews(ProgramBuilder& builder) : builder_(builder) {}

  // Returns heads that a call reads. If a copy is necessary, adds it at `step`.
  ByteRange Read(int64_t step, BufferId buffer, const HeadForm& form, int64_t begin, int64_t count);
  // Returns heads that a call overwrites in full. WriteBack, after the call, copies them to their
  // place.
  ByteRange Write(BufferId buffer, const HeadForm& form, int64_t begin, int64_t count);
  void WriteBack(int64_t step);

 private:
  ByteRange Packed(BufferId buffer, int64_t bytes);

  ProgramBuilder& builder_;
  std::map<BufferId, BufferId> packed_;  // at most one copy per tensor
  std::vector<ComputeCall> to_write_back_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_HEAD_VIEWS_H_
