// RequestCall: the calls of a request that several clients send together.
#include <utility>

#include "server/edge/call/call_failures.h"
#include "server/edge/call/request_call.h"
#include "server/edge/data/run_deferred.h"
#include "server/edge/header/error_details.h"

namespace ringattn::server {

WriterHeader RequestCall::Gather() {
  life_.MoveTo(CallState::kGathering);
  next_progress_ = opened_at_ + request_->reply.progress_interval;
  const AttentionShape& shape = request_->valid.spec.shape;
  return {GroupKey(),      direction_,       request_->fingerprint,
          shape.seq_len_q, shape.seq_len_kv, request_->valid.transport};
}

WriterKey RequestCall::GroupKey() const { return {caller_.principal, request_->request_id}; }

int RequestCall::writer_index() const { return request_->valid.transport.writer->index; }

void RequestCall::StartAsLead(TransportChoice joined,
                              std::vector<std::shared_ptr<RequestCall>> followers) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    followers_ = std::move(followers);
    if (waits_for_writers()) {
      Announce(std::move(joined));
      if (early_loss_.has_value() && life_.in_core()) {
        lost_writer_ = true;
        GiveUp(*std::move(early_loss_));
      }
    } else {
      EndFollowers(status_, /*left_itself=*/true);  // it ended while the last writer joined
    }
    steps = Next();
  }
  context_->core->Wake();
  Do(std::move(steps));
}

bool RequestCall::Follow(std::shared_ptr<RequestCall> lead) {
  absl::MutexLock lock(&mutex_);
  if (!waits_for_writers()) return false;
  lead_ = std::move(lead);
  life_.MoveTo(CallState::kQueued);
  return true;
}

void RequestCall::FailWriter(const Failure& failure) {
  FailWriter(ToGrpcStatus(failure, context_->limits));
}

void RequestCall::FailWriter(const grpc::Status& status) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (!waits_for_writers() && !life_.in_core()) return;
    if (life_.state() == CallState::kGivingUp) {
      End(why_);  // its own reason
    } else {
      End(status);
    }
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::LeaveWriters(const Failure& why) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (life_.over()) return;
    if (life_.in_core()) {
      GiveUp(why);
    } else {
      End(why);  // the group has another call in its place already
    }
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::LoseWriter(int index, const std::string& why) {
  Steps steps;
  {
    absl::MutexLock lock(&mutex_);
    if (waits_for_writers()) early_loss_ = WriterLost(index, why);
    if (life_.over() || !life_.in_core()) return;
    lost_writer_ = true;
    GiveUp(WriterLost(index, why));
    steps = Next();
  }
  Do(std::move(steps));
}

void RequestCall::LeaveGroup(const std::string& why) {
  // The call's status waits for this, and so does the server's end.
  deferred_ = [this, groups = context_->writers, key = GroupKey(), index = writer_index(), why] {
    groups->Leave(this, key, index, why);
  };
}

void RequestCall::EndFollowers(const grpc::Status& status, bool left_itself) {
  if (!request_.has_value() || !request_->valid.transport.writer.has_value() || follows()) return;
  context_->writers->End(this, GroupKey());
  if (status.ok() || followers_.empty()) return;
  grpc::Status theirs = status;
  if (left_itself) {
    theirs = ToGrpcStatus(WriterLost(0, status.error_message()), context_->limits);
  }
  RunDeferred([followers = followers_, theirs = std::move(theirs)] {
    for (const auto& follower : followers) follower->FailWriter(theirs);
  });
}

std::vector<std::shared_ptr<RequestCall>> RequestCall::Followers() {
  absl::MutexLock lock(&mutex_);
  return followers_;
}

}  // namespace ringattn::server
