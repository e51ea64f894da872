#include "worker/operation/transfer_reporter.h"

#include <utility>
#include <vector>

#include "common/observability/log.h"

namespace ringattn::worker {
namespace {

template <typename Message>
void Name(const OperationInfo& info, Message* message) {
  message->set_operation_id(info.id);
  message->set_generation(info.generation);
}

}  // namespace

TransferReporter::TransferReporter(std::function<void(v1::JoinRequest)> send,
                                   absl::Duration interval)
    : send_(std::move(send)), interval_(interval), thread_([this] { Run(); }) {}

void TransferReporter::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void TransferReporter::Uploaded(const OperationInfo& info) {
  v1::JoinRequest message;
  Name(info, message.mutable_uploaded());
  send_(std::move(message));
}

void TransferReporter::Delivered(const OperationInfo& info) {
  v1::JoinRequest message;
  Name(info, message.mutable_delivered());
  send_(std::move(message));
}

void TransferReporter::Failed(const OperationInfo& info, TransferEnd end, const std::string& why) {
  LogWarning("a tensor transfer failed", {{"request_id", info.request_id},
                                          {"traceparent", info.traceparent},
                                          {"operation_id", info.id},
                                          {"generation", info.generation},
                                          {"reason", why}});
  v1::JoinRequest message;
  v1::TransferProgress* progress = message.mutable_transfer_progress();
  Name(info, progress);
  switch (end) {
    case TransferEnd::kWorkerError:
      progress->set_failure(why);
      break;
    case TransferEnd::kRegionReleased:
      progress->set_region_released(true);
      break;
    case TransferEnd::kBadChunk:
      progress->set_bad_chunk(why);
      break;
  }
  send_(std::move(message));
}

void TransferReporter::Watch(const void* transfer, const OperationInfo& info,
                             std::function<TransferCounts()> counts) {
  absl::MutexLock lock(&mutex_);
  watched_[transfer] = {info, std::move(counts), {}};
}

void TransferReporter::Unwatch(const void* transfer) {
  absl::MutexLock lock(&mutex_);
  watched_.erase(transfer);
}

void TransferReporter::Run() {
  while (true) {
    std::vector<v1::JoinRequest> messages;
    {
      absl::MutexLock lock(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopping_), interval_)) return;
      for (auto& [transfer, watched] : watched_) {
        const TransferCounts now = watched.counts();
        if (now == watched.reported) continue;
        watched.reported = now;
        v1::TransferProgress* progress = messages.emplace_back().mutable_transfer_progress();
        Name(watched.info, progress);
        progress->set_received(now.received_bytes);
        progress->set_sent(now.sent_bytes);
        progress->set_waits_for_client(now.waits_for_client);
      }
    }
    for (v1::JoinRequest& message : messages) send_(std::move(message));
  }
}

}  // namespace ringattn::worker
