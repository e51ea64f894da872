#include "common/schedule/head_views.h"

#include "absl/strings/str_cat.h"

namespace ringattn {

ComputeCall CopyOfHeads(const HeadForm& form, int64_t begin, int64_t count, const ByteRange& all,
                        const ByteRange& packed, bool to_packed) {
  const int64_t run_bytes = count * form.head_bytes;
  const int64_t pitch = form.heads * form.head_bytes;
  const ByteRange spread = {all.buffer, all.offset + begin * form.head_bytes,
                            (form.outer - 1) * pitch + run_bytes};
  ComputeCall call;
  call.op = ComputeCall::Op::kCopy;
  call.copy = {form.outer, run_bytes, pitch, run_bytes};
  call.source = spread;
  call.target = packed;
  if (!to_packed) {
    std::swap(call.source, call.target);
    std::swap(call.copy.source_pitch, call.copy.target_pitch);
  }
  return call;
}

ByteRange HeadViews::Packed(BufferId buffer, int64_t bytes) {
  const auto [found, is_new] = packed_.try_emplace(buffer, kNoBuffer);
  if (is_new) {
    found->second = builder_.AddBuffer(absl::StrCat("heads.", builder_.NameOf(buffer)), 0);
  }
  return builder_.First(found->second, bytes);
}

ByteRange HeadViews::Read(int64_t step, BufferId buffer, const HeadForm& form, int64_t begin,
                          int64_t count) {
  const int64_t run_bytes = count * form.head_bytes;
  if (form.outer == 1 && form.anywhere) return {buffer, begin * form.head_bytes, run_bytes};
  const ByteRange packed = Packed(buffer, form.outer * run_bytes);
  if (packed.bytes == 0) return packed;  // for instance a mask with no keys
  builder_.AddCall(step, CopyOfHeads(form, begin, count, builder_.Whole(buffer), packed, true));
  return packed;
}

ByteRange HeadViews::Write(BufferId buffer, const HeadForm& form, int64_t begin, int64_t count) {
  const int64_t run_bytes = count * form.head_bytes;
  if (form.outer == 1 && form.anywhere) return {buffer, begin * form.head_bytes, run_bytes};
  const ByteRange packed = Packed(buffer, form.outer * run_bytes);
  if (packed.bytes == 0) return packed;
  to_write_back_.push_back(CopyOfHeads(form, begin, count, builder_.Whole(buffer), packed, false));
  return packed;
}

void HeadViews::WriteBack(int64_t step) {
  for (ComputeCall& call : to_write_back_) builder_.AddCall(step, std::move(call));
  to_write_back_.clear();
}

}  // namespace ringattn
