// RegionStage: a call's tensors in memory that workers share for as long as this lives, so that
// calls can be measured that find them there.
#ifndef RINGATTN_CLIENT_CLI_REGION_STAGE_H_
#define RINGATTN_CLIENT_CLI_REGION_STAGE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "client/call.h"
#include "client/call_tensors.h"
#include "client/client.h"
#include "client/region.h"

namespace ringattn::client::cli {

// Adds --transport=auto|relay|direct|host and --staging_limit.
void AddTransportFlags(CLI::App* command, std::string* transport, int64_t* staging_bytes);
// Adds --channels_per_worker.
void AddChannelsFlag(CLI::App* command, int* channels);
// REQUIRES: one of the flag's values. What is asked for by name is required.
void SetTransport(const std::string& transport, CallOptions* options);

// Not thread safe. `Args`, `Results`: of Forward or Backward.
template <typename Args, typename Results>
class RegionStage {
 public:
  // Everything copied into one region of the client's. Errors: Region::Allocate's.
  static absl::StatusOr<RegionStage> Make(Client* client, const Args& args,
                                          const Results& results) {
    int64_t bytes = 0;
    const auto add = [&](auto& tensor) { bytes += Rounded(tensor.size()); };
    Args sized_args = args;
    Results sized_results = results;
    ForEachTensor(sized_args, add);
    ForEachTensor(sized_results, add);
    absl::StatusOr<std::unique_ptr<Region>> region =
        Region::Allocate(client, std::max<int64_t>(bytes, 1));
    if (!region.ok()) return region.status();
    return RegionStage(*std::move(region), args, results);
  }

  const Args& args() const { return args_; }
  const Results& results() const { return results_; }

  // The results to where the caller wants them.
  void CopyBack() const {
    for (const auto& [from, to] : back_) {
      if (!to.empty()) std::memcpy(to.data(), from.data(), to.size());
    }
  }

 private:
  static constexpr size_t kAlignment = 64;
  static int64_t Rounded(size_t bytes) {
    return static_cast<int64_t>((bytes + kAlignment - 1) / kAlignment * kAlignment);
  }

  RegionStage(std::unique_ptr<Region> region, const Args& args, const Results& results)
      : region_(std::move(region)), args_(args), results_(results) {
    uint8_t* at = region_->memory().data();
    const auto take = [&](size_t bytes) {
      const MutableBytes place(at, bytes);
      at += Rounded(bytes);
      return place;
    };
    ForEachTensor(args_, [&](ConstBytes& tensor) {
      if (tensor.empty()) return;
      const MutableBytes place = take(tensor.size());
      std::memcpy(place.data(), tensor.data(), tensor.size());
      tensor = place;
    });
    ForEachTensor(results_, [&](MutableBytes& tensor) {
      const MutableBytes place = take(tensor.size());
      back_.emplace_back(place, tensor);
      tensor = place;
    });
  }

  std::unique_ptr<Region> region_;
  Args args_;
  Results results_;
  std::vector<std::pair<MutableBytes, MutableBytes>> back_;  // from the region, to the caller's
};

}  // namespace ringattn::client::cli

#endif  // RINGATTN_CLIENT_CLI_REGION_STAGE_H_
