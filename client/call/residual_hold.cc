#include "client/call/residual_hold.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "client/transfer/grpc_status.h"
#include "ringattn/v1/attention.grpc.pb.h"

namespace ringattn::client {
namespace {

constexpr int kMostHandles = 1024;  // per request: Limits::max_renewed_residuals

// Moves as many handles as the request has room for.
template <typename Field>
void TakeSome(std::set<std::string>* from, int room, Field* to) {
  for (; room > 0 && !from->empty(); --room)
    to->Add(std::move(from->extract(from->begin()).value()));
}

}  // namespace

ResidualHold::ResidualHold(std::shared_ptr<grpc::Channel> channel,
                           std::shared_ptr<BearerToken> token, const Options& options)
    : channel_(std::move(channel)), token_(std::move(token)), options_(options) {}

ResidualHold::~ResidualHold() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    if (context_ != nullptr) context_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
}

void ResidualHold::Hold(const std::vector<std::string>& handles) {
  if (handles.empty()) return;
  absl::MutexLock lock(&mutex_);
  for (const std::string& handle : handles) {
    released_.erase(handle);
    if (held_.insert(handle).second) unsaid_.insert(handle);
  }
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
}

void ResidualHold::Release(const std::vector<std::string>& handles) {
  absl::MutexLock lock(&mutex_);
  for (const std::string& handle : handles) {
    if (held_.erase(handle) == 0) continue;
    confirmed_.erase(handle);
    // A hold that was never sent need not be released.
    if (unsaid_.erase(handle) == 0) released_.insert(handle);
  }
}

size_t ResidualHold::confirmed() const {
  absl::MutexLock lock(&mutex_);
  return confirmed_.size();
}

absl::Status ResidualHold::trouble() const {
  absl::MutexLock lock(&mutex_);
  return trouble_;
}

void ResidualHold::Run() {
  absl::Duration backoff = options_.min_backoff;
  const auto stopping = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stopping_; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      unsaid_ = held_;
      released_.clear();
      confirmed_.clear();
    }
    const absl::Time begun = absl::Now();
    const absl::Status status = Serve();
    if (absl::Now() - begun > options_.max_backoff) backoff = options_.min_backoff;
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    trouble_ = status;
    confirmed_.clear();
    if (absl::IsUnimplemented(status)) return;
    if (mutex_.AwaitWithTimeout(absl::Condition(&stopping), backoff)) return;
    backoff = std::min(2 * backoff, options_.max_backoff);
  }
}

absl::Status ResidualHold::Serve() {
  grpc::ClientContext context;
  if (token_ != nullptr) token_->AddTo(&context);
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::OkStatus();
    context_ = &context;
  }
  const auto stub = v1::AttentionService::NewStub(channel_);
  const auto stream = stub->HoldResiduals(&context);
  v1::HoldResidualsRequest request;
  v1::HoldResidualsResponse response;
  bool is_open = true;
  while (is_open && NextRequest(&request)) {
    is_open = stream->Write(request) && stream->Read(&response);
    if (is_open) Take(request, response);
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

bool ResidualHold::NextRequest(v1::HoldResidualsRequest* request) {
  const auto wanted = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return stopping_ || !unsaid_.empty() || !released_.empty();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&wanted), options_.sign_of_life);
  if (stopping_) return false;
  request->Clear();
  TakeSome(&unsaid_, kMostHandles, request->mutable_residual_handles());
  TakeSome(&released_, kMostHandles - request->residual_handles_size(),
           request->mutable_released_handles());
  return true;
}

void ResidualHold::Take(const v1::HoldResidualsRequest& request,
                        const v1::HoldResidualsResponse& response) {
  absl::MutexLock lock(&mutex_);
  trouble_ = absl::OkStatus();
  const int answered = std::min(request.residual_handles_size(), response.residuals_size());
  for (int i = 0; i < answered; ++i) {
    const std::string& handle = request.residual_handles(i);
    if (!response.residuals(i).reason().empty()) {
      held_.erase(handle);
    } else if (held_.count(handle) > 0) {
      confirmed_.insert(handle);
    }
  }
}

}  // namespace ringattn::client
