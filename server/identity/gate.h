// Gate: authenticates calls of services that do not identify their callers themselves.
#ifndef RINGATTN_SERVER_IDENTITY_GATE_H_
#define RINGATTN_SERVER_IDENTITY_GATE_H_

#include <functional>

#include <grpcpp/security/auth_metadata_processor.h>

#include "server/identity/client_directory.h"

namespace ringattn::server {

// Used on the public listener with a clients file. Requires a known client for every service except
//   grpc.health.v1   open: probes have no credentials, and it reports only whether this serves
//   ringattn.v1      identifies callers itself and answers with error details
// Reflection, and services that libraries register, are therefore limited to known clients. Thread
// safe.
class Gate final : public grpc::AuthMetadataProcessor {
 public:
  // `directory` must outlive the server. `on_refusal` is called with the reason of each rejection.
  Gate(const ClientDirectory* directory, std::function<void(const Failure&)> on_refusal);

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* response) override;

 private:
  const ClientDirectory* const directory_;
  const std::function<void(const Failure&)> on_refusal_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_IDENTITY_GATE_H_
