#include "worker/comm/lone/lone_ring_transport.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/device/host_event.h"

namespace ringattn::worker {
namespace {

// A group of no transfers is done at once; one with transfers has nobody to reach.
class LoneCommunicator : public Communicator {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  std::string transport() const override { return "none"; }
  bool takes_compute_units() const override { return false; }

  EventRef Start(std::vector<PeerTransfer> group, std::vector<EventRef>, RunControl*) override {
    auto event = std::make_shared<HostEvent>();
    event->Finish(group.empty() ? absl::OkStatus()
                                : absl::UnavailableError("a ring of one has no peers"));
    return event;
  }
  void Abort(const std::string&) override {}
};

}  // namespace

absl::StatusOr<std::string> LoneRingTransport::Prepare(uint64_t, int, int world_size) {
  if (world_size == 1) return std::string();
  return absl::FailedPreconditionError(
      absl::StrCat("a ring of ", world_size, " needs a transport: ", reason_.message()));
}

absl::StatusOr<std::unique_ptr<Communicator>> LoneRingTransport::Connect(
    uint64_t, const std::vector<std::string>& blobs, absl::Time) {
  if (blobs.size() == 1) return std::make_unique<LoneCommunicator>();
  return absl::FailedPreconditionError(std::string(reason_.message()));
}

}  // namespace ringattn::worker
