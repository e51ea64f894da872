#include "client/kv/step_rings.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/api/error.h"
#include "common/attention/dtype.h"
#include "common/base/limits.h"

namespace ringattn::client {
namespace {

// Slots hold a layer call of so many tokens: large decode batches, and prompts in small chunks.
// Longer chunks travel on the stream, whose copies cost little next to their attention.
constexpr int64_t kSlotTokens = 256;
constexpr int64_t kMinFrameBytes = 256 * kKiB;
constexpr int64_t kMaxFrameBytes = 4 * kMiB;
// A description and the layer call that follows it.
constexpr int64_t kSlots = 2;

// Frames of one rank's requests and responses.
struct FrameBytes {
  int64_t request = 0;
  int64_t response = 0;
};

FrameBytes FramesOf(const KvCacheSpec& spec, const KvPlacement& placement) {
  FrameBytes most;
  const int64_t element = ElementBytes(spec.dtype);
  for (const KvLayerGroup& group : spec.groups) {
    const int64_t heads = group.num_heads / placement.head_parts;
    const int64_t kv_heads = group.num_kv_heads / placement.head_parts;
    const int64_t sent = heads * group.head_dim + kv_heads * (group.head_dim + group.head_dim_v);
    most.request = std::max(most.request, sent * element);
    // out and lse of a partial result are fp32.
    most.response = std::max<int64_t>(most.response, heads * (group.head_dim_v + 1) * 4);
  }
  const auto frame = [](int64_t token_bytes) {
    return std::clamp(kSlotTokens * token_bytes + kKiB, kMinFrameBytes, kMaxFrameBytes);
  };
  return {frame(most.request), frame(most.response)};
}

absl::Status BadAnswer(absl::string_view message) {
  return MakeErrorWithReason(absl::StatusCode::kInternal, message, "BAD_ANSWER");
}

}  // namespace

absl::StatusOr<std::shared_ptr<StepRings>> StepRings::Make(const KvCacheSpec& spec,
                                                           const KvPlacement& placement,
                                                           SharedRegion::AttachCall attach) {
  const FrameBytes frames = FramesOf(spec, placement);
  StepRingLayout layout;
  layout.slots = kSlots;
  layout.request_bytes = StepRingLayout::SlotBytes(frames.request);
  layout.response_bytes = StepRingLayout::SlotBytes(frames.response);
  auto region = SharedRegion::Make(layout.bytes() * placement.world_size(), std::move(attach));
  if (!region.ok()) return region.status();
  std::shared_ptr<StepRings> rings(
      new StepRings(*std::move(region), layout, placement.world_size()));
  rings->region_->AwaitFirstRound(SharedRegion::kFirstRound);
  if (!rings->region_->workers().empty()) return rings;
  const std::string trouble = rings->region_->trouble();
  return absl::FailedPreconditionError(absl::StrCat("no worker of this machine attached memory",
                                                    trouble.empty() ? "" : ": ", trouble));
}

StepRings::StepRings(std::shared_ptr<SharedRegion> region, const StepRingLayout& layout,
                     int world_size)
    : region_(std::move(region)), layout_(layout) {
  for (int rank = 0; rank < world_size; ++rank) {
    uint8_t* const ring = region_->data() + rank * layout_.bytes();
    rings_.push_back({StepRingWriter(StepRingQueue::Requests(ring, layout_)),
                      StepRingReader(StepRingQueue::Responses(ring, layout_))});
  }
}

StepRings::~StepRings() { region_->Stop(); }

std::string StepRings::region_id() const {
  std::string why;
  return region_->id(&why);
}

v1::StepRing StepRings::Start(size_t rank) {
  rings_[rank].requests.Reset();
  rings_[rank].responses.Reset();
  v1::StepRing ring;
  ring.set_region_id(region_id());
  ring.set_offset(rank * static_cast<uint64_t>(layout_.bytes()));
  ring.set_slots(static_cast<uint32_t>(layout_.slots));
  ring.set_request_bytes(static_cast<uint64_t>(layout_.request_bytes));
  ring.set_response_bytes(static_cast<uint64_t>(layout_.response_bytes));
  return ring;
}

bool StepRings::Fits(const std::vector<const v1::StepRequest*>& requests,
                     int64_t response_bytes) const {
  const int64_t header = StepRingLayout::kSlotHeaderBytes;
  if (static_cast<int64_t>(requests.size()) > layout_.slots ||
      response_bytes > layout_.response_bytes - header) {
    return false;
  }
  return std::all_of(requests.begin(), requests.end(), [&](const v1::StepRequest* request) {
    return static_cast<int64_t>(request->ByteSizeLong()) <= layout_.request_bytes - header;
  });
}

void StepRings::Send(size_t rank, const std::vector<const v1::StepRequest*>& requests) {
  StepRingWriter& ring = rings_[rank].requests;
  for (const v1::StepRequest* request : requests) {
    ring.Put(static_cast<int64_t>(request->ByteSizeLong()),
             [&](uint8_t* frame) { request->SerializeWithCachedSizesToArray(frame); });
    ring.Publish();
  }
}

bool StepRings::Wait(const std::vector<size_t>& ranks, absl::Duration sleep) {
  const auto any = [&] {
    return std::any_of(ranks.begin() + 1, ranks.end(),
                       [&](size_t rank) { return rings_[rank].responses.HasNext(); });
  };
  return rings_[ranks.front()].responses.WaitOr(any, active_wait_.duration(), sleep) !=
         SharedWord::Wake::kTimeout;
}

absl::StatusOr<bool> StepRings::Take(size_t rank, v1::StepResponse* response) {
  const absl::StatusOr<bool> taken = rings_[rank].responses.Take(&frame_);
  if (!taken.ok()) return BadAnswer(taken.status().message());
  if (!*taken) return false;
  if (!response->ParseFromString(frame_)) {
    return BadAnswer("a message in the ring is not a StepResponse");
  }
  return true;
}

}  // namespace ringattn::client
