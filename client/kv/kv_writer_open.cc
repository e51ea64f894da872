// KvWriter: opening a cache, its streams and rings, and opening them again after a broken stream.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/api/error.h"
#include "client/kv/kv_writer.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

// A worker that does not open its stream in this time counts as unreachable.
constexpr absl::Duration kDirectOpenTime = absl::Seconds(3);

// Status of a google.rpc.Status, with its details.
absl::Status FromRpcStatus(const google::rpc::Status& status) {
  absl::Status converted(static_cast<absl::StatusCode>(status.code()), status.message());
  SetDetails(status.SerializeAsString(), &converted);
  return converted;
}

}  // namespace

absl::Status KvWriter::Open() {
  std::vector<v1::Transport> accept;
  absl::Status no_rings;
  switch (options_.transport) {
    case TransportPreference::kAuto:
      if (workers_->UnreachableReason().empty()) {
        no_rings = MakeRings();
        if (no_rings.ok()) accept.push_back(v1::TRANSPORT_HOST_MEMORY);
        accept.push_back(v1::TRANSPORT_DIRECT);
      }
      accept.push_back(v1::TRANSPORT_RELAY);
      break;
    case TransportPreference::kHostMemory:
      if (no_rings = MakeRings(); !no_rings.ok()) {
        return MakeErrorWithReason(
            absl::StatusCode::kFailedPrecondition,
            absl::StrCat("no accepted transport is available: no host memory: ",
                         no_rings.message()),
            "TRANSPORT_UNAVAILABLE");
      }
      accept = {v1::TRANSPORT_HOST_MEMORY};
      break;
    case TransportPreference::kDirect:
      accept = {v1::TRANSPORT_DIRECT};
      break;
    case TransportPreference::kRelay:
      accept = {v1::TRANSPORT_RELAY};
      break;
    default:
      return absl::InvalidArgumentError(
          "transport of a K/V cache must be auto, host_memory, direct or relay");
  }
  absl::Status status = OpenEpoch(accept, options_.answered_step, options_.deadline);
  if (options_.transport == TransportPreference::kAuto && transport_ == v1::TRANSPORT_HOST_MEMORY &&
      (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
       absl::IsResourceExhausted(status))) {
    no_rings = status;
    status = OpenEpoch({v1::TRANSPORT_DIRECT, v1::TRANSPORT_RELAY}, options_.answered_step,
                       options_.deadline);
  }
  if (status.ok() && !no_rings.ok()) {
    transport_reason_ =
        absl::StrCat("no host memory: ", no_rings.message(), "; ", transport_reason_);
  }
  if (options_.transport == TransportPreference::kAuto && transport_ == v1::TRANSPORT_DIRECT &&
      (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status))) {
    const std::string why(status.message());
    workers_->NoteUnreachable(why);
    status = OpenEpoch({v1::TRANSPORT_RELAY}, options_.answered_step, options_.deadline);
    transport_reason_ = absl::StrCat("the workers cannot be reached: ", why);
  }
  return Noted(status);
}

absl::Status KvWriter::MakeRings() {
  if (rings_ != nullptr) return absl::OkStatus();
  if (placement_.head_parts < 1 || placement_.position_parts < 1) {
    return absl::InternalError("GetCache returned no placement");
  }
  auto rings = StepRings::Make(spec_, placement_, attach_);
  if (!rings.ok()) return rings.status();
  rings_ = *std::move(rings);
  return absl::OkStatus();
}

absl::Status KvWriter::OpenEpoch(const std::vector<v1::Transport>& accept, uint64_t answered_step,
                                 absl::Duration deadline) {
  const absl::Time end = MonotonicNow() + deadline;
  v1::OpenCacheRequest request;
  request.set_cache_id(cache_id_);
  ring_region_id_.clear();
  for (const v1::Transport transport : accept) {
    if (transport == v1::TRANSPORT_HOST_MEMORY) ring_region_id_ = rings_->region_id();
    // A region may be attached nowhere for a moment.
    if (transport == v1::TRANSPORT_HOST_MEMORY && ring_region_id_.empty()) continue;
    request.add_accept(transport);
  }
  if (request.accept().empty()) {
    return absl::UnavailableError("the region of the step rings is not attached to any worker");
  }
  request.set_region_id(ring_region_id_);
  request.set_answered_step(answered_step);
  // KV_ADOPTING, KV_BUSY and a coordinator that restarts end after a while.
  absl::StatusOr<v1::OpenCacheResponse> opened;
  for (absl::Duration backoff = kMinBackoff;; backoff = std::min(2 * backoff, kMaxBackoff)) {
    opened = service_->Open(request, end - MonotonicNow());
    if (opened.ok()) break;
    if (!absl::IsUnavailable(opened.status()) || MonotonicNow() + backoff >= end ||
        DetailsOf(opened.status()).reason == kTlsHandshakeFailed) {
      return opened.status();
    }
    absl::SleepFor(backoff);
  }
  epoch_ = opened->epoch();
  transport_ = opened->transport();
  transport_reason_ = opened->transport_reason();
  placement_proto_ = opened->placement();
  placement_.head_parts = static_cast<int>(placement_proto_.head_parts());
  placement_.position_parts = static_cast<int>(placement_proto_.position_parts());
  if (placement_.head_parts < 1 || placement_.position_parts < 1 ||
      (uses_workers() && opened->shards_size() != placement_.world_size())) {
    return absl::InternalError("OpenCache returned a placement that contradicts its tickets");
  }
  std::vector<StepStream::Peer> peers;
  for (const v1::KvShardTicket& ticket : opened->shards()) {
    if (!uses_workers()) break;
    if (ticket.endpoints().empty() || ticket.rank() != peers.size()) {
      return absl::InternalError("OpenCache returned tickets without endpoints or out of order");
    }
    StepStream::Peer peer;
    peer.channel = workers_->To(ticket.endpoints(0), placement_.world_size()).front();
    peer.name = absl::StrCat("worker ", ticket.worker(), " at ", ticket.endpoints(0));
    peer.is_worker = true;
    peer.hello.set_token(ticket.token());
    peers.push_back(std::move(peer));
  }
  if (!uses_workers()) {
    StepStream::Peer peer;
    peer.channel = service_->channel();
    peer.name = "coordinator";
    peer.hello.set_token(opened->token());
    peers.push_back(std::move(peer));
  }
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    peers[rank].hello.set_cache_id(cache_id_);
    peers[rank].hello.set_epoch(epoch_);
    peers[rank].hello.set_rank(static_cast<uint32_t>(rank));
  }
  if (transport_ != v1::TRANSPORT_HOST_MEMORY) rings_ = nullptr;
  streams_ = std::make_unique<StepStreams>(std::move(peers), service_->token(), rings_);
  StepStreams::Limits limits;
  limits.deadline = end;
  if (uses_workers()) {
    limits.deadline = std::min(end, MonotonicNow() + kDirectOpenTime);
  }
  for (absl::Duration backoff = kMinBackoff;; backoff = std::min(2 * backoff, kMaxBackoff)) {
    const absl::Status status = OpenStreams(limits);
    if (status.ok()) break;
    if (!absl::IsUnavailable(status) || MonotonicNow() + backoff >= limits.deadline) return status;
    absl::SleepFor(backoff);
  }
  return ResumeStep(opened->next_step());
}

absl::Status KvWriter::OpenStreams(const StepStreams::Limits& limits) {
  begun_on_streams_ = false;
  auto opened = streams_->Open(limits);
  if (!opened.ok()) return opened.status();
  if (step_.has_value()) return absl::OkStatus();
  // Ranks that undid a step and ranks that never began it may report different lengths. The
  // smaller one is valid on all of them.
  std::map<uint64_t, std::pair<size_t, uint64_t>> lengths;  // ranks, smallest length
  for (const v1::StepOpened& peer : *opened) {
    for (const v1::KvSequence& sequence : peer.sequences()) {
      auto [found, added] =
          lengths.emplace(sequence.sequence(), std::pair<size_t, uint64_t>(0, sequence.length()));
      ++found->second.first;
      found->second.second = std::min<uint64_t>(found->second.second, sequence.length());
    }
  }
  sequences_.clear();
  for (const auto& [id, ranks_and_length] : lengths) {
    if (ranks_and_length.first == opened->size()) sequences_[id] = ranks_and_length.second;
  }
  return absl::OkStatus();
}

absl::Status KvWriter::ResumeStep(uint64_t next_step) {
  if (next_step == 0) return absl::InternalError("OpenCache returned next_step 0");
  if (!step_.has_value()) {
    committed_ = next_step - 1;
    return absl::OkStatus();
  }
  const uint64_t number = step_->step.number;
  if (next_step == number + 1 && is_complete()) {
    committed_ = number;
    step_.reset();
    return absl::OkStatus();
  }
  const bool undone = !step_->answered.empty();
  if (next_step == number && !undone) {
    step_->sent = step_->accepted = false;  // sent again with the next call
    return absl::OkStatus();
  }
  step_.reset();
  committed_ = next_step - 1;
  // StepOpened has the lengths of the new epoch.
  streams_->Close();
  if (absl::Status status = OpenStreams({}); !status.ok()) return status;
  return MakeErrorWithReason(absl::StatusCode::kAborted,
                             absl::StrCat("the coordinator was lost during step ", number,
                                          ", and the workers undid it; begin it again"),
                             kStepUndone);
}

absl::Status KvWriter::Recover(const absl::Status& broken, const StepStreams::Limits& limits) {
  const auto info = service_->GetOnce(
      cache_id_,
      std::min(kStateDeadline, std::max(limits.deadline - MonotonicNow(), absl::Milliseconds(1))));
  // Without an answer only the workers know; the next attempt finds out.
  if (!info.ok()) return absl::OkStatus();
  if (info->has_ended()) return FromRpcStatus(info->ended());
  if (info->epoch() > epoch_) {
    return MakeErrorWithReason(absl::StatusCode::kAborted, "another writer has opened the cache",
                               "KV_FENCED");
  }
  // A worker that restarted has lost the cache, and the coordinator will report it. A coordinator
  // that restarted does not know the relay's token, and it needs the name of the rings' region.
  const bool region_renamed = transport_ == v1::TRANSPORT_HOST_MEMORY &&
                              !rings_->region_id().empty() &&
                              rings_->region_id() != ring_region_id_;
  const bool relay_unknown = transport_ == v1::TRANSPORT_RELAY && absl::IsUnauthenticated(broken);
  if (!region_renamed && !relay_unknown) return absl::OkStatus();
  uint64_t answered = committed_;
  if (step_.has_value() && is_complete()) answered = step_->step.number;
  std::vector<v1::Transport> accept = {v1::TRANSPORT_RELAY};
  if (region_renamed) {
    // The call in progress is cut for the workers, so the relay cannot carry it.
    accept = {v1::TRANSPORT_HOST_MEMORY};
    if (options_.transport == TransportPreference::kAuto) accept.push_back(v1::TRANSPORT_DIRECT);
  }
  return OpenEpoch(accept, answered, options_.recovery_time);
}

}  // namespace ringattn::client
