#include "common/security/credentials.h"

namespace ringattn {

std::shared_ptr<grpc::ServerCredentials> TransportSecurity::ServerCredentials() const {
  return grpc::InsecureServerCredentials();
}

std::shared_ptr<grpc::ChannelCredentials> TransportSecurity::ChannelCredentials() const {
  return grpc::InsecureChannelCredentials();
}

}  // namespace ringattn
