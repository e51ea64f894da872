// Some heads of tensors that lie with all of them, as kernels take them: by themselves. Where they
// are one run of bytes that kernels take, that run; else a copy, which is made before the call or
// after it.
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

// How a tensor's heads lie: [outer, heads, head_bytes].
struct HeadForm {
  int64_t outer = 0;
  int64_t heads = 0;
  int64_t head_bytes = 0;
  // Kernels take it at any multiple of its elements. Rows of heads begin where rows may.
  bool anywhere = false;
};

// The bytes of heads [begin, begin + count) from the first to the last, and the copy that
// gathers or spreads them; `packed` has them alone.
ComputeCall CopyOfHeads(const HeadForm& form, int64_t begin, int64_t count, const ByteRange& all,
                        const ByteRange& packed, bool to_packed);

// One rank's. Not thread safe.
class HeadViews {
 public:
  explicit HeadViews(ProgramBuilder& builder) : builder_(builder) {}

  // Heads that a call reads; where they have to be copied, a call at `step` does it.
  ByteRange Read(int64_t step, BufferId buffer, const HeadForm& form, int64_t begin, int64_t count);
  // Heads that a call writes, in full. WriteBack, after it, puts them into their place.
  ByteRange Write(BufferId buffer, const HeadForm& form, int64_t begin, int64_t count);
  void WriteBack(int64_t step);

 private:
  ByteRange Packed(BufferId buffer, int64_t bytes);

  ProgramBuilder& builder_;
  std::map<BufferId, BufferId> packed_;  // one at a time of each tensor
  std::vector<ComputeCall> to_write_back_;
};

}  // namespace ringattn

#endif  // RINGATTN_COMMON_SCHEDULE_HEAD_VIEWS_H_
