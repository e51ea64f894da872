#include "client/call/residual_hold.h"

#include <string>
#include <utility>
#include <vector>

#include "ringattn/v1/attention.grpc.pb.h"

namespace ringattn::client {
namespace {

class ResidualLeases final : public LeaseStream {
 public:
  ResidualLeases(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context)
      : stub_(v1::AttentionService::NewStub(channel)), stream_(stub_->HoldResiduals(context)) {}

  bool Exchange(const std::vector<std::string>& held, const std::vector<std::string>& released,
                std::vector<bool>* gone) override {
    v1::HoldResidualsRequest request;
    request.mutable_residual_handles()->Add(held.begin(), held.end());
    request.mutable_released_handles()->Add(released.begin(), released.end());
    v1::HoldResidualsResponse response;
    if (!stream_->Write(request) || !stream_->Read(&response)) return false;
    gone->clear();
    for (const v1::ResidualStatus& residual : response.residuals()) {
      gone->push_back(!residual.reason().empty());
    }
    return true;
  }
  void WritesDone() override { stream_->WritesDone(); }
  grpc::Status Finish() override { return stream_->Finish(); }

 private:
  const std::unique_ptr<v1::AttentionService::Stub> stub_;
  const std::unique_ptr<
      grpc::ClientReaderWriter<v1::HoldResidualsRequest, v1::HoldResidualsResponse>>
      stream_;
};

}  // namespace

ResidualHold::ResidualHold(std::shared_ptr<grpc::Channel> channel,
                           std::shared_ptr<BearerToken> token, const Options& options)
    : LeaseHold(
          [channel = std::move(channel)](grpc::ClientContext* context) {
            return std::make_unique<ResidualLeases>(channel, context);
          },
          std::move(token), options) {}

}  // namespace ringattn::client
