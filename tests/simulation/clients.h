// Clients and the edge that serves them: they upload, read slowly or not at all,
// cancel, run out of time, take over their own requests, and replay what was lost.
#ifndef RINGATTN_TESTS_SIMULATION_CLIENTS_H_
#define RINGATTN_TESTS_SIMULATION_CLIENTS_H_

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/simulation/control_plane.h"
#include "tests/simulation/sim_worker.h"

namespace ringattn::server::simulation {

// Not thread safe.
class Clients {
 public:
  using FindWorker = std::function<SimWorker*(const std::string& name)>;

  // Whether a worker may write into the memory of the client of this request.
  using WritesFor = std::function<bool(const std::string& request_id)>;

  Clients(World* world, ControlPlane* control, FindWorker find_worker, WritesFor writes_for)
      : world_(world),
        control_(control),
        find_worker_(std::move(find_worker)),
        writes_for_(std::move(writes_for)) {}

  // A request of random size and character.
  void StartRandomCall(int max_world_size);
  // One that behaves; `name` identifies it in Succeeded.
  void StartGoodCall(const std::string& name, int world_size);
  bool Succeeded(const std::string& name) const { return calls_.at(name).succeeded; }

  void OnAction(const Action& action);
  void OnCoordinatorRestarted();
  bool AllEnded() const;
  void set_draining(bool draining) { was_drained_ |= draining; }
  void allow_compute_failures() { compute_may_fail_ = true; }

  // How many streams ended how, by reason; "OK" is one.
  const std::map<std::string, int64_t>& ends() const { return ends_; }
  // When a request last ended, however it did.
  absl::Time last_end() const { return last_end_; }

 private:
  struct Call {
    std::string id;
    std::string principal;  // of any client
    std::string client;     // that shares the service
    uint64_t fingerprint = 0;
    int64_t tokens = 0;
    int world_size = 0;  // 0: any
    bool backward = false;
    absl::Duration retain;  // zero: nothing is to be kept
    std::string residual;   // that it reads
    bool keep_residual = false;
    bool good = false;           // no mischief
    bool idles = false;          // stops uploading for ever
    bool takes_nothing = false;  // of its result
    bool direct = false;         // it streams to the members itself
    bool is_inline = false;      // its header carries all inputs
    bool in_memory = false;      // its tensors are in a region, if all members have that
    absl::Duration prepare;      // zero: it is not only prepared
    absl::Duration upload_time;
    absl::Duration download_time;
    absl::Duration deadline = absl::InfiniteDuration();
    int attempts = 0;
    bool succeeded = false;
  };
  // A Forward's residual, as its client sees it.
  struct Residual {
    std::string principal;
    absl::Time expires;
    bool consumed = false;
    bool forgotten = false;  // by a coordinator that started again
  };
  struct Stream {
    std::string call;
    absl::Time deadline;
    bool cancelled = false;
    bool superseded = false;
    bool other_header = false;
    bool ended = false;
    std::string operation_id;
    std::vector<std::pair<SimWorker*, uint64_t>> members;  // and their processes
    bool downloading = false;
    bool uploading = false;
    size_t uploads_due = 0;  // members whose bytes have not all come from the client yet
    std::set<int> resting;   // members that will move again
    bool shard_failed = false;
    bool direct = false;
    bool is_inline = false;
    std::set<int> taken;  // members that have all of the client's bytes
    uint64_t moves = 0;   // of a direct stream's bytes, as members report them
  };

  void ReadSomething(Call* call);
  void FillResidual(const Call& call, RequestArrived* arrived);
  void NoteResidual(const Call& call, const FinishRequest& finish);
  void NotePrepared(const Call& call, const Stream& stream, const FinishRequest& finish);
  std::string WhyIllegalResidual(const Call& call, const std::string& reason) const;
  void Open(const std::string& call_id, bool other_header);
  void PlanMischief(StreamId stream);
  void Attach(const Call& call);
  void Upload(StreamId stream, const AcceptRequest& accept);
  void TakeUpload(StreamId stream, int member);
  void EndRest(StreamId stream, int member);
  void ReportUpload(StreamId stream);
  void ReportMembers(StreamId stream);
  void ReportTransfers(StreamId stream);
  bool StandsStill(const Stream& stream, int member) const;
  void ReportDownload(StreamId stream);
  void FailShard(StreamId stream, int member);
  void TryFinishDownload(StreamId stream);
  void OnFail(StreamId stream, const Failure& failure);
  std::string WhyIllegal(const Stream& stream, const Failure& failure) const;
  bool Served(StreamId stream) const;
  bool InFlight(StreamId stream) const { return !streams_.at(stream).ended; }

  World* const world_;
  ControlPlane* const control_;
  const FindWorker find_worker_;
  const WritesFor writes_for_;
  std::map<std::string, Call> calls_;
  std::map<StreamId, Stream> streams_;
  std::map<std::string, Residual> residuals_;  // by handle
  StreamId last_stream_ = 0;
  bool was_drained_ = false;
  bool compute_may_fail_ = false;
  std::map<std::string, int64_t> ends_;
  absl::Time last_end_ = absl::InfinitePast();
};

}  // namespace ringattn::server::simulation

#endif  // RINGATTN_TESTS_SIMULATION_CLIENTS_H_
