#include "client/call/cache_hold.h"

#include <string>
#include <utility>
#include <vector>

#include "ringattn/v1/kv_cache.grpc.pb.h"

namespace ringattn::client {
namespace {

class CacheLeases final : public LeaseStream {
 public:
  CacheLeases(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context)
      : stub_(v1::KvCacheService::NewStub(channel)), stream_(stub_->HoldCaches(context)) {}

  bool Exchange(const std::vector<std::string>& held, const std::vector<std::string>& released,
                std::vector<bool>* gone) override {
    v1::HoldCachesRequest request;
    request.mutable_cache_ids()->Add(held.begin(), held.end());
    request.mutable_released_ids()->Add(released.begin(), released.end());
    v1::HoldCachesResponse response;
    if (!stream_->Write(request) || !stream_->Read(&response)) return false;
    gone->clear();
    for (const v1::KvLeaseStatus& cache : response.caches()) {
      gone->push_back(!cache.ended_reason().empty());
    }
    return true;
  }
  void WritesDone() override { stream_->WritesDone(); }
  grpc::Status Finish() override { return stream_->Finish(); }

 private:
  const std::unique_ptr<v1::KvCacheService::Stub> stub_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::HoldCachesRequest, v1::HoldCachesResponse>>
      stream_;
};

}  // namespace

CacheHold::CacheHold(std::shared_ptr<grpc::Channel> channel, std::shared_ptr<BearerToken> token,
                     const Options& options)
    : LeaseHold(
          [channel = std::move(channel)](grpc::ClientContext* context) {
            return std::make_unique<CacheLeases>(channel, context);
          },
          std::move(token), options) {}

}  // namespace ringattn::client
