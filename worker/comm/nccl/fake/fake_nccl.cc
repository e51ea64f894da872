// The part of libnccl.so.2 that rings use, for ranks in threads of one process on the fake CUDA
// runtime. Communicators are non-blocking and join when all ranks have come. Groups are launched in
// the background. Transfers wait for their peer until they are aborted. FakeNcclFaults injects
// faults.
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "worker/testing/fake_cuda/fake_cuda.h"

namespace {

struct Transfer {
  bool send;
  void* data;
  size_t bytes;
  int peer;
  bool done = false;
};

using TransferRef = std::shared_ptr<Transfer>;

// All ranks with one unique id.
struct Clique {
  std::mutex mutex;
  std::condition_variable changed;
  int joined = 0;
  struct Channel {
    std::deque<TransferRef> sends, receives;
  };
  std::map<std::pair<int, int>, Channel> channels;  // by (from, to)
};

struct State {
  std::shared_ptr<Clique> clique;
  int rank = 0;
  int world_size = 0;
  std::atomic<bool> aborted{false};
  std::atomic<bool> launching{false};
};

void SleepMs(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// The group's kernel: runs all transfers concurrently until all are done or the rank aborts.
void RunTransfers(const std::shared_ptr<State>& state, const std::vector<TransferRef>& group) {
  Clique& clique = *state->clique;
  std::unique_lock<std::mutex> lock(clique.mutex);
  if (state->aborted) return;
  for (const TransferRef& transfer : group) {
    const auto key = transfer->send ? std::pair(state->rank, transfer->peer)
                                    : std::pair(transfer->peer, state->rank);
    Clique::Channel& channel = clique.channels[key];
    (transfer->send ? channel.sends : channel.receives).push_back(transfer);
    while (!channel.sends.empty() && !channel.receives.empty()) {
      Transfer& from = *channel.sends.front();
      Transfer& to = *channel.receives.front();
      std::memcpy(to.data, from.data, std::min(from.bytes, to.bytes));
      from.done = to.done = true;
      channel.sends.pop_front();
      channel.receives.pop_front();
    }
  }
  clique.changed.notify_all();
  clique.changed.wait(lock, [&] {
    for (const TransferRef& transfer : group) {
      if (!transfer->done && !state->aborted) return false;
    }
    return true;
  });
  // Aborted: this rank's memory must not be accessed any more.
  for (auto& [key, channel] : clique.channels) {
    for (auto* queue : {&channel.sends, &channel.receives}) {
      for (const TransferRef& transfer : group) {
        for (auto it = queue->begin(); it != queue->end();) {
          it = *it == transfer ? queue->erase(it) : it + 1;
        }
      }
    }
  }
}

struct Operation {
  ncclComm_t comm;
  cudaStream_t stream;
  TransferRef transfer;
};
thread_local std::vector<Operation> group_operations;
thread_local int group_depth = 0;

std::mutex cliques_mutex;
std::map<std::string, std::shared_ptr<Clique>> cliques;

}  // namespace

struct ncclComm {
  std::shared_ptr<State> state = std::make_shared<State>();
  std::thread launcher;  // of the last group
};

namespace {

ncclResult_t Add(bool send, void* data, size_t count, int peer, ncclComm_t comm,
                 cudaStream_t stream) {
  if (group_depth == 0 || comm->state->launching) return ncclInvalidUsage;
  if (send && Faults().refuse_sends) return ncclInvalidArgument;
  group_operations.push_back(
      {comm, stream, std::make_shared<Transfer>(Transfer{send, data, count, peer})});
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<uint64_t> next{1};
  std::memset(id, 0x5a, sizeof(*id));
  const uint64_t number = next++;
  std::memcpy(id, &number, sizeof(number));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world_size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config->blocking != 0 || config->minCTAs > config->maxCTAs) return ncclInvalidArgument;
  const std::lock_guard<std::mutex> lock(cliques_mutex);
  std::shared_ptr<Clique>& clique = cliques[std::string(id.internal, sizeof(id.internal))];
  if (clique == nullptr) clique = std::make_shared<Clique>();
  *comm = new ncclComm();
  (*comm)->state->clique = clique;
  (*comm)->state->rank = rank;
  (*comm)->state->world_size = world_size;
  const std::lock_guard<std::mutex> clique_lock(clique->mutex);
  ++clique->joined;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const std::lock_guard<std::mutex> lock(comm->state->clique->mutex);
  const bool busy = comm->state->clique->joined < comm->state->world_size || comm->state->launching;
  *state = Faults().lost_network ? ncclRemoteError : busy ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    const std::lock_guard<std::mutex> lock(comm->state->clique->mutex);
    comm->state->aborted = true;
    comm->state->clique->changed.notify_all();
  }
  SleepMs(Faults().abort_ms);
  if (comm->launcher.joinable()) comm->launcher.join();
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth > 0 || group_operations.empty()) return ncclSuccess;
  const std::vector<Operation> operations = std::exchange(group_operations, {});
  const ncclComm_t comm = operations.front().comm;
  if (comm->launcher.joinable()) comm->launcher.join();
  comm->state->launching = true;
  comm->launcher = std::thread([state = comm->state, operations] {
    const int delay = Faults().launch_ms;
    for (int i = 0; i < delay && !state->aborted; ++i) SleepMs(1);
    std::vector<TransferRef> group;
    for (const Operation& operation : operations) group.push_back(operation.transfer);
    FakeCudaEnqueue(operations.front().stream, [state, group] { RunTransfers(state, group); });
    state->launching = false;
  });
  return ncclInProgress;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Add(true, const_cast<void*>(data), count, peer, comm, stream);
}

ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Add(false, data, count, peer, comm, stream);
}

const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited" : "fake error";
}

const char* ncclGetLastError(ncclComm_t) { return ""; }

}  // extern "C"
