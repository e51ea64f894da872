#include "client/call/lease_hold.h"

#include <algorithm>
#include <utility>

#include "client/transfer/grpc_status.h"
#include "common/base/monotonic_time.h"

namespace ringattn::client {
namespace {

constexpr size_t kMaxIdsPerRequest = 1024;  // Limits::max_renewed_residuals

// Moves ids until the request has `most`, counting `others`.
void TakeSome(std::set<std::string>* from, size_t others, std::vector<std::string>* to) {
  while (!from->empty() && others + to->size() < kMaxIdsPerRequest) {
    to->push_back(std::move(from->extract(from->begin()).value()));
  }
}

}  // namespace

LeaseHold::LeaseHold(Connect connect, std::shared_ptr<BearerToken> token, const Options& options)
    : connect_(std::move(connect)), token_(std::move(token)), options_(options) {}

LeaseHold::~LeaseHold() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
}

void LeaseHold::Hold(const std::vector<std::string>& ids) {
  if (ids.empty()) return;
  absl::MutexLock lock(&mutex_);
  for (const std::string& id : ids) {
    released_.erase(id);
    if (held_.insert(id).second) unsent_.insert(id);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
}

void LeaseHold::Release(const std::vector<std::string>& ids) {
  absl::MutexLock lock(&mutex_);
  for (const std::string& id : ids) {
    if (held_.erase(id) == 0) continue;
    confirmed_.erase(id);
    // A hold that was never sent need not be released.
    if (unsent_.erase(id) == 0) released_.insert(id);
  }
}

size_t LeaseHold::confirmed() const {
  absl::MutexLock lock(&mutex_);
  return confirmed_.size();
}

absl::Status LeaseHold::trouble() const {
  absl::MutexLock lock(&mutex_);
  return trouble_;
}

void LeaseHold::Run() {
  absl::Duration backoff = options_.min_backoff;
  const auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      unsent_ = held_;
      released_.clear();
      confirmed_.clear();
    }
    const absl::Time begun = MonotonicNow();
    const absl::Status status = Serve();
    if (MonotonicNow() - begun > options_.max_backoff) backoff = options_.min_backoff;
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    trouble_ = status;
    confirmed_.clear();
    if (absl::IsUnimplemented(status)) return;
    if (mutex_.AwaitWithTimeout(absl::Condition(&stopping), backoff)) return;
    backoff = std::min(2 * backoff, options_.max_backoff);
  }
}

absl::Status LeaseHold::Serve() {
  grpc::ClientContext context;
  if (token_ != nullptr) token_->AddTo(&context);
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::OkStatus();
    context_ = &context;
  }
  const std::unique_ptr<LeaseStream> stream = connect_(&context);
  Request request;
  std::vector<bool> gone;
  bool is_open = true;
  while (is_open && NextRequest(&request)) {
    is_open = stream->Exchange(request.held, request.released, &gone);
    if (is_open) Take(request, gone);
  }
  if (is_open) {
    stream->WritesDone();
    context.TryCancel();  // regardless of the server
  }
  const grpc::Status status = stream->Finish();
  absl::MutexLock lock(&mutex_);
  context_ = nullptr;
  return FromGrpcStatus(status);
}

bool LeaseHold::NextRequest(Request* request) {
  const auto wanted = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !unsent_.empty() || !released_.empty();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&wanted), options_.sign_of_life);
  if (stopping_) return false;
  *request = {};
  TakeSome(&unsent_, 0, &request->held);
  TakeSome(&released_, request->held.size(), &request->released);
  return true;
}

void LeaseHold::Take(const Request& request, const std::vector<bool>& gone) {
  absl::MutexLock lock(&mutex_);
  trouble_ = absl::OkStatus();
  const size_t answered = std::min(request.held.size(), gone.size());
  for (size_t i = 0; i < answered; ++i) {
    const std::string& id = request.held[i];
    if (gone[i]) {
      held_.erase(id);
    } else if (held_.count(id) > 0) {
      confirmed_.insert(id);
    }
  }
}

}  // namespace ringattn::client
