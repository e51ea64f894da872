// RequestCall: the transfer of tensors and its supervision.
#include <algorithm>
#include <utility>

#include "absl/time/time.h"
#include "server/core/requests/plan_summary.h"
#include "server/edge/call/call_failures.h"
#include "server/edge/call/replies.h"
#include "server/edge/call/request_call.h"
#include "server/edge/data/coordinator_relay.h"
#include "server/edge/data/member_plane.h"

namespace ringattn::server {

std::shared_ptr<DataPlane> RequestCall::MakePlane(TransferSpec spec) {
  // May produce a million spans, so it does not run on the core's thread.
  spec.shards = ShardsOf(*spec.accept.plan, spec.request.spec);
  if (context_->make_data_plane) {
    return context_->make_data_plane(std::move(spec), shared_from_this());
  }
  return std::make_shared<CoordinatorRelay>(std::move(spec), shared_from_this(), context_->limits,
                                            context_->channels, context_->secret);
}

void RequestCall::OpenDataPlane(TransferSpec spec) {
  std::shared_ptr<DataPlane> plane = MakePlane(std::move(spec));
  std::optional<Failure> bad = plane->Open();
  CountInputs(*plane);
  {
    absl::MutexLock lock(&mutex_);
    if (life_.state() == CallState::kOpening) {
      life_.MoveTo(CallState::kTransferring);
      plane_ = std::move(plane);
      if (bad.has_value()) {
        GiveUp(*std::move(bad));
      } else if (download_.has_value()) {
        DrainDeferred();
      }
      return;  // Unbusy continues
    }
  }
  plane->Stop();
}

void RequestCall::OpenInline(const Plan& plan, v1::Accepted accepted) {
  constexpr int64_t kSmallBytes = 32 << 10;
  Enqueue(Wrap(direction_, std::move(accepted)), 0);
  if (!only_prepares()) context_->metrics->AcceptedInline();
  if (transport_ == v1::TRANSPORT_HOST_MEMORY || transport_ == v1::TRANSPORT_CUDA_MEMORY) {
    plane_ = std::make_shared<MemberPlane>(request_->valid, transport_);
    life_.MoveTo(CallState::kTransferring);
    is_small_ = true;
    is_single_ = request_->reply.single_message;
    return;
  }
  // A request that is only prepared has no tensors, but perhaps many spans.
  const ValidRequest& request = request_->valid;
  plane_ = inline_plane_ =
      std::make_shared<InlinePlane>(direction_, request, request_->reply,
                                    only_prepares() ? ShardPlan() : ShardsOf(plan, request.spec));
  request_->inline_tensors = nullptr;
  life_.MoveTo(CallState::kTransferring);
  const TransferTotals totals = plane_->totals();
  is_small_ = totals.bytes_down <= kSmallBytes;
  is_single_ = is_small_ && request_->reply.single_message &&
               totals.bytes_down <= request_->reply.max_chunk_bytes;
  if (!only_prepares()) context_->metrics->ReceivedFromClient(totals.received_bytes);
}

void RequestCall::EnqueueOutputs() {
  auto chunks = inline_plane_->Cut(download_->outputs);
  download_->outputs.Clear();
  if (!chunks.ok()) return GiveUp(BadOutputs(chunks.status()));
  for (DownloadMerger::Chunk& chunk : *chunks) {
    Enqueue(std::move(chunk.message), chunk.payload_bytes);
  }
}

void RequestCall::JoinMessages() {
  Outgoing joined;
  std::vector<wire::MessageBuffer> messages;
  for (Outgoing& outgoing : outgoing_) {
    joined.payload_bytes += outgoing.payload_bytes;
    messages.push_back(std::move(outgoing.message));
  }
  joined.message = MakeSingleReply(messages);
  outgoing_.clear();
  outgoing_.push_back(std::move(joined));
}

// Sends Accepted first, because the members have no work before the client knows of them.
void RequestCall::HandOutTickets(const TransferSpec& spec, v1::Accepted accepted) {
  AddTickets(spec.accept, ShardsOf(*spec.accept.plan, spec.request.spec), &accepted);
  absl::MutexLock lock(&mutex_);
  if (life_.state() != CallState::kOpening) return;
  Enqueue(Wrap(direction_, std::move(accepted)), 0);
  life_.MoveTo(CallState::kTransferring);
  if (download_.has_value()) DrainDeferred();  // Unbusy continues
}

// gRPC's threads assemble the outputs, not the core's thread.
void RequestCall::DrainDeferred() {
  deferred_ = [plane = plane_] { plane->Drain(); };
}

void RequestCall::TakeChunk() {
  std::shared_ptr<DataPlane> plane;
  {
    absl::MutexLock lock(&mutex_);
    if (!life_.over()) plane = plane_;
  }
  std::optional<Failure> bad;
  if (plane != nullptr) {
    bad = plane->Feed(incoming_);
    CountInputs(*plane);
  }
  incoming_.Clear();
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    read_phase_ = ReadPhase::kIdle;
    if (bad.has_value() && !life_.over()) GiveUp(*std::move(bad));
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::CountInputs(const DataPlane& plane) {
  const int64_t received = plane.totals().received_bytes;
  context_->metrics->ReceivedFromClient(received - std::exchange(counted_bytes_, received));
}

void RequestCall::OnRoom() {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::OnOutput(grpc::ByteBuffer message, int64_t payload_bytes) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    Enqueue(std::move(message), payload_bytes);
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::OnDrained() {
  absl::MutexLock lock(&mutex_);
  if (!life_.over()) context_->core->Post(DownloadFinished{id_});
}

void RequestCall::OnMemberFailed(int rank, const std::string& reason) {
  absl::MutexLock lock(&mutex_);
  if (!life_.over()) context_->core->Post(ShardStreamFailed{id_, rank, reason});
}

// Reports stalled members and clients to the core, which knows the limits, and ends uploads that
// are too slow.
void RequestCall::LookAtTransfer(absl::Time now, const Coordinator& core) {
  if (now - looked_at_ < context_->report_interval) return;
  looked_at_ = now;
  TransferStalls stalls = plane_->Look();
  if (stalls.known) context_->core->Post(MembersStalled{id_, std::move(stalls.members)});
  const bool client_moves = stalls.known && !stalls.client;
  if (download_.has_value()) {
    if (client_moves) context_->core->Post(DownloadProgressed{id_});
    return;
  }
  if (client_moves) context_->core->Post(UploadProgressed{id_});
  const int64_t received = plane_->totals().received_bytes;
  const bool contended = stalls.waits_for_input && core.stats().queued_requests > 0;
  meter_.Look(now, received - std::exchange(metered_bytes_, received), stalls.waits_for_input,
              contended);
  if (stalls.waits_for_input && meter_.too_slow()) GiveUp(UploadTooSlow(context_->limits));
}

void RequestCall::SendProgress(absl::Time now, const Coordinator& core) {
  next_progress_ = now + request_->reply.progress_interval;
  // A client that does not read gets no queue of progress messages.
  if (plane_ == nullptr || outgoing_.size() >= 4) return;
  const std::optional<OperationView> view =
      core.FindOperation(request_->request_id, caller_.principal);
  if (!view.has_value()) return;
  Enqueue(Wrap(direction_, MakeProgress(*view, plane_->totals())), 0);
}

}  // namespace ringattn::server
