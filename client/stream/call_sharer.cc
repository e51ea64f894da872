#include "client/stream/call_sharer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "client/stream/shared_stream.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {

CallSharer::CallSharer(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
                       const Options& options)
    : channel_(std::move(channel)), token_(std::move(token)), options_(options) {}

CallSharer::~CallSharer() {
  std::vector<std::shared_ptr<SharedStream>> streams;
  {
    absl::MutexLock lock(&mutex_);
    max_calls_ = 0;
    streams.push_back(std::move(current_));
    for (const std::weak_ptr<SharedStream>& each : all_) {
      if (std::shared_ptr<SharedStream> stream = each.lock()) streams.push_back(std::move(stream));
    }
  }
  for (const std::shared_ptr<SharedStream>& stream : streams) {
    if (stream != nullptr) stream->Abandon();
  }
  streams.clear();
  const absl::MutexLock lock(&mutex_, absl::Condition(this, &CallSharer::IsReleased));
}

void CallSharer::Learn(uint32_t max_calls) {
  absl::MutexLock lock(&mutex_);
  max_calls_ = max_calls;
}

std::unique_ptr<CallStream> CallSharer::Open(const CallStreamOptions& options,
                                             CallStream::User* user) {
  // Read without the lock, because it reads a file.
  std::string token = token_ == nullptr ? "" : token_->Get();
  std::shared_ptr<SharedStream> over;  // released without the lock
  absl::MutexLock lock(&mutex_);
  if (max_calls_ == 0 || MonotonicNow() < not_before_) return nullptr;
  if (current_ != nullptr && (current_->IsOver() || token != current_token_)) {
    current_->Close();
    over = std::move(current_);
  }
  if (current_ == nullptr) {
    current_ = std::make_shared<SharedStream>(this, token);
    current_token_ = std::move(token);
    ++streams_;
    all_.erase(
        std::remove_if(all_.begin(), all_.end(), [](const auto& each) { return each.expired(); }),
        all_.end());
    all_.push_back(current_);
    current_->Open();
  }
  // The server does not read while a stream has all the calls that it may have, and would not learn
  // of a cancellation.
  return current_->Add(options, user, std::max(max_calls_ - 1, 1u));
}

void CallSharer::Refused(bool lacks_calls) {
  absl::MutexLock lock(&mutex_);
  if (lacks_calls) max_calls_ = 0;
  not_before_ = MonotonicNow() + options_.refused_pause;
}

void CallSharer::Released() {
  absl::MutexLock lock(&mutex_);
  --streams_;
}

}  // namespace ringattn::client
