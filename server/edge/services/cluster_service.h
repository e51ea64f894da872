// ClusterServiceImpl: the public ClusterService: server information and topology.
#ifndef RINGATTN_SERVER_EDGE_SERVICES_CLUSTER_SERVICE_H_
#define RINGATTN_SERVER_EDGE_SERVICES_CLUSTER_SERVICE_H_

#include <string>

#include "common/base/limits.h"
#include "ringattn/v1/cluster.grpc.pb.h"
#include "server/edge/access/callers.h"
#include "server/edge/loop/core_loop.h"
#include "server/edge/status/topology_board.h"

namespace ringattn::server {

v1::GetServerInfoResponse MakeServerInfo(const std::string& version, const Limits& limits);

// WatchTopology uses byte buffers, so that one serialized message serves all watchers.
using ClusterServiceBase = v1::ClusterService::WithRawCallbackMethod_WatchTopology<
    v1::ClusterService::WithCallbackMethod_GetServerInfo<
        v1::ClusterService::WithCallbackMethod_GetTopology<v1::ClusterService::Service>>>;

// Thread safe.
class ClusterServiceImpl final : public ClusterServiceBase {
 public:
  // All pointers must outlive the server's calls.
  ClusterServiceImpl(const std::string& version, const Limits& limits, absl::Duration retry_after,
                     CoreLoop* core, TopologyBoard* board, Callers* callers);

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetTopology(grpc::CallbackServerContext* call,
                                        const v1::GetTopologyRequest* request,
                                        v1::GetTopologyResponse* response) override;
  grpc::ServerWriteReactor<grpc::ByteBuffer>* WatchTopology(
      grpc::CallbackServerContext* call, const grpc::ByteBuffer* request) override;

 private:
  const v1::GetServerInfoResponse info_;
  const grpc::Status too_many_watchers_;
  CoreLoop* const core_;
  TopologyBoard* const board_;
  Callers* const callers_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_SERVICES_CLUSTER_SERVICE_H_
