#include "client/stream/call_sharer.h"

#include <algorithm>
#include <iterator>
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
    streams = std::exchange(current_, {});
    for (const std::weak_ptr<SharedStream>& each : all_) {
      if (std::shared_ptr<SharedStream> stream = each.lock()) streams.push_back(std::move(stream));
    }
  }
  for (const std::shared_ptr<SharedStream>& stream : streams) {
    stream->Abandon();
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
  std::vector<std::shared_ptr<SharedStream>> over;  // released without the lock
  absl::MutexLock lock(&mutex_);
  if (max_calls_ == 0) return nullptr;
  over = TakeOver(token);
  // The server does not read while a stream has all the calls that it may have, and would not learn
  // of a cancellation.
  const uint32_t most = std::max(max_calls_ - 1, 1u);
  for (const std::shared_ptr<SharedStream>& stream : current_) {
    if (std::unique_ptr<CallStream> call = stream->Add(options, user, most)) return call;
  }
  if (static_cast<int>(current_.size()) >= options_.most_streams || MonotonicNow() < not_before_) {
    return nullptr;
  }
  return OpenStream(std::move(token))->Add(options, user, most);
}

std::vector<std::shared_ptr<SharedStream>> CallSharer::TakeOver(const std::string& token) {
  const bool all = token != current_token_;
  const auto over = std::stable_partition(
      current_.begin(), current_.end(),
      [all](const std::shared_ptr<SharedStream>& stream) { return !all && !stream->IsOver(); });
  std::vector<std::shared_ptr<SharedStream>> taken(std::make_move_iterator(over),
                                                   std::make_move_iterator(current_.end()));
  current_.erase(over, current_.end());
  for (const std::shared_ptr<SharedStream>& stream : taken) stream->Close();
  return taken;
}

std::shared_ptr<SharedStream> CallSharer::OpenStream(std::string token) {
  auto stream = std::make_shared<SharedStream>(this, token);
  current_token_ = std::move(token);
  ++streams_;
  all_.erase(
      std::remove_if(all_.begin(), all_.end(), [](const auto& each) { return each.expired(); }),
      all_.end());
  all_.push_back(stream);
  current_.push_back(stream);
  stream->Open();
  return stream;
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
