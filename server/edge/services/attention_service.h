// AttentionServiceImpl: the public AttentionService. Forward, Backward and Calls are raw byte
// streams on the server side, which keeps tensor bytes out of protobuf objects.
//
// Tests: bad_requests_test.cc
#ifndef RINGATTN_SERVER_EDGE_SERVICES_ATTENTION_SERVICE_H_
#define RINGATTN_SERVER_EDGE_SERVICES_ATTENTION_SERVICE_H_

#include "ringattn/v1/attention.grpc.pb.h"
#include "server/edge/call/request_call.h"

namespace ringattn::server {

using AttentionServiceBase = v1::AttentionService::WithRawCallbackMethod_Forward<
    v1::AttentionService::WithRawCallbackMethod_Backward<
        v1::AttentionService::WithRawCallbackMethod_Calls<
            v1::AttentionService::WithCallbackMethod_GetStatus<
                v1::AttentionService::WithCallbackMethod_Cancel<
                    v1::AttentionService::WithCallbackMethod_DeleteResidual<
                        v1::AttentionService::WithCallbackMethod_RenewResiduals<
                            v1::AttentionService::WithCallbackMethod_HoldResiduals<
                                v1::AttentionService::Service>>>>>>>>;

// Thread safe.
class AttentionServiceImpl final : public AttentionServiceBase {
 public:
  explicit AttentionServiceImpl(const RequestContext* context) : context_(context) {}

  ByteStreamReactor* Forward(grpc::CallbackServerContext* call) override;
  ByteStreamReactor* Backward(grpc::CallbackServerContext* call) override;
  ByteStreamReactor* Calls(grpc::CallbackServerContext* call) override;
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* call,
                                      const v1::GetStatusRequest* request,
                                      v1::GetStatusResponse* response) override;
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* call,
                                   const v1::CancelRequest* request,
                                   v1::CancelResponse* response) override;
  grpc::ServerUnaryReactor* DeleteResidual(grpc::CallbackServerContext* call,
                                           const v1::DeleteResidualRequest* request,
                                           v1::DeleteResidualResponse* response) override;
  grpc::ServerUnaryReactor* RenewResiduals(grpc::CallbackServerContext* call,
                                           const v1::RenewResidualsRequest* request,
                                           v1::RenewResidualsResponse* response) override;
  grpc::ServerBidiReactor<v1::HoldResidualsRequest, v1::HoldResidualsResponse>* HoldResiduals(
      grpc::CallbackServerContext* call) override;

 private:
  const RequestContext* const context_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVICES_ATTENTION_SERVICE_H_
