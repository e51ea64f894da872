#include "server/identity/gate.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace ringattn::server {
namespace {

constexpr char kPathKey[] = ":path";
constexpr const char* kOpenPaths[] = {"/grpc.health.v1.Health/", "/ringattn.v1.AttentionService/",
                                      "/ringattn.v1.ClusterService/",
                                      "/ringattn.v1.KvCacheService/"};

bool IsOpen(const grpc::AuthMetadataProcessor::InputMetadata& metadata) {
  const auto path = metadata.find(kPathKey);
  if (path == metadata.end()) return false;
  for (const char* open : kOpenPaths) {
    if (absl::StartsWith({path->second.data(), path->second.size()}, open)) return true;
  }
  return false;
}

}  // namespace

Gate::Gate(const ClientDirectory* directory, std::function<void(const Failure&)> on_refusal)
    : directory_(directory), on_refusal_(std::move(on_refusal)) {}

grpc::Status Gate::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                           OutputMetadata*, OutputMetadata*) {
  if (IsOpen(metadata)) return grpc::Status::OK;
  const auto who = directory_->Identify(metadata, context);
  const Failure* failure = std::get_if<Failure>(&who);
  if (failure == nullptr) return grpc::Status::OK;
  on_refusal_(*failure);
  return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, failure->message);
}

}  // namespace ringattn::server
