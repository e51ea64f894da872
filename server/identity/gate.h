// Gate: lets calls of services that do not look at their callers themselves pass for known
// clients only.
#ifndef RINGATTN_SERVER_IDENTITY_GATE_H_
#define RINGATTN_SERVER_IDENTITY_GATE_H_

#include <functional>

#include <grpcpp/security/auth_metadata_processor.h>

#include "server/identity/client_directory.h"

namespace ringattn::server {

// The public listener's, where there is a directory. It asks for an identity for everything but
//   grpc.health.v1   open: probes have none, and it says no more than whether this serves
//   ringattn.v1      these services look for themselves, and answer with details, which a gate
//                    cannot
// so that reflection, and whatever a library registers by itself, is for known clients.
// Thread safe.
class Gate final : public grpc::AuthMetadataProcessor {
 public:
  // `directory` outlives the server. Called with the reason of each refusal.
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
