#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/executor/executor.h"

namespace ringattn {

absl::StatusOr<std::unique_ptr<Operation>> Operation::Create(AttentionSpec spec, ShardPlan plan,
                                                             Program program,
                                                             std::vector<int> members,
                                                             Device* device) {
  std::unique_ptr<Operation> operation(new Operation());
  for (const BufferSpec& buffer : program.buffers) {
    auto memory = device->Allocate(buffer.bytes);
    if (!memory.ok()) {
      return absl::Status(memory.status().code(),
                          absl::StrCat("buffer ", buffer.name, ": ", memory.status().message()));
    }
    operation->buffers_.push_back(*std::move(memory));
  }
  operation->spec_ = std::move(spec);
  operation->plan_ = std::move(plan);
  operation->program_ = std::move(program);
  operation->members_ = std::move(members);
  return operation;
}

DeviceBuffer* Operation::InputBuffer(TensorId id) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (program_.buffers[i].input == id) return buffers_[i].get();
  }
  return nullptr;
}

DeviceBuffer* Operation::OutputBuffer(TensorId id) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (program_.buffers[i].output == id) return buffers_[i].get();
  }
  return nullptr;
}

int64_t Operation::ShardBytes(TensorId id) const {
  const TensorLayout layout = LayoutOf(spec_, id);
  const std::vector<Shard>& shards = layout.on_kv_axis ? plan_.kv : plan_.q;
  return layout.outer * RowsIn(shards[program_.rank]) * layout.inner_bytes;
}

}  // namespace ringattn
