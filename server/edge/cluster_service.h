// The public ClusterService: what the server is and what it runs on.
#ifndef RINGATTN_SERVER_EDGE_CLUSTER_SERVICE_H_
#define RINGATTN_SERVER_EDGE_CLUSTER_SERVICE_H_

#include <string>

#include "common/base/limits.h"
#include "ringattn/v1/cluster.grpc.pb.h"
#include "server/edge/core_loop.h"
#include "server/edge/topology_board.h"

namespace ringattn::server {

v1::GetServerInfoResponse MakeServerInfo(const std::string& version, const Limits& limits);

// Thread safe.
class ClusterServiceImpl final : public v1::ClusterService::CallbackService {
 public:
  // `core` and `board` outlive the server's calls.
  ClusterServiceImpl(const std::string& version, const Limits& limits, CoreLoop* core,
                     TopologyBoard* board);

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;
  grpc::ServerUnaryReactor* GetTopology(grpc::CallbackServerContext* call,
                                        const v1::GetTopologyRequest* request,
                                        v1::GetTopologyResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchTopologyResponse>* WatchTopology(
      grpc::CallbackServerContext* call, const v1::WatchTopologyRequest* request) override;

 private:
  const v1::GetServerInfoResponse info_;
  CoreLoop* const core_;
  TopologyBoard* const board_;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_CLUSTER_SERVICE_H_
