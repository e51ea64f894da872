// HandleServer: the Unix socket at which a rank hands what it shares with its ring, its segment and
// its regions, to the others, as file descriptors. Descriptors mean the same in every namespace,
// where paths under /proc and CUDA's legacy handles do not.
//
// A connection is one question and its answer. The asker shows the token that the rank has put into
// its blob for this generation; only the ring's members see blobs. Either end leaves the other
// alone unless both are the same user's processes.
#ifndef RINGATTN_WORKER_COMM_PEER_PEER_DOOR_H_
#define RINGATTN_WORKER_COMM_PEER_PEER_DOOR_H_

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/local_memory/scoped_descriptor.h"
#include "worker/device/cuda/device_region.h"

namespace ringattn::worker {

// What is asked for beside regions, which are asked for by their numbers in the rank's table.
inline constexpr int32_t kPeerSegmentItem = -1;

// What a rank shows while it is a member of one generation.
struct PeerHandles {
  uint64_t generation = 0;
  std::string token;  // kTokenBytes
  int segment = -1;   // stays the caller's, open for as long as the offer stands
  DeviceRegions regions;
};

// Where another rank's door is, and what opens it.
struct PeerAddress {
  std::string socket;
  uint64_t generation = 0;
  std::string token;
};

// Thread safe.
class HandleServer {
 public:
  struct Options {
    // Of the socket, a name that nobody else has; it and others' doors have to be seen under the
    // same path. Empty: in no folder, but a name in the network namespace.
    std::string folder;
    uid_t user = geteuid();  // whose processes are served
    absl::Duration question_timeout = absl::Seconds(5);
    size_t max_waiting = 64;  // connections without a question; the oldest goes
  };
  // Takes files of doors that died away from the folder. FAILED_PRECONDITION if it cannot listen.
  static absl::StatusOr<std::unique_ptr<HandleServer>> Open(Options options);
  // Withdraws what is offered.
  ~HandleServer();
  HandleServer(const HandleServer&) = delete;
  HandleServer& operator=(const HandleServer&) = delete;

  // As PeerAddress::socket.
  const std::string& socket() const { return socket_; }

  // Until what it returns is destroyed: from then on nothing is handed out for that token. It may
  // outlive the door.
  std::shared_ptr<const void> Offer(PeerHandles offer);

  // Asks at another's door, and waits until `deadline` at most, or until `stop` says so, which is
  // asked every 20 ms and may be null: CANCELLED. The descriptor is the caller's to
  // close. UNAVAILABLE if that rank is gone or has given the ring up; FAILED_PRECONDITION if its
  // socket is not to be seen here, or one of the two is another user's; INTERNAL for a region that
  // it does not have.
  static absl::StatusOr<ScopedDescriptor> Fetch(const PeerAddress& from, int32_t item,
                                                absl::Time deadline,
                                                const std::function<bool()>& stop = nullptr,
                                                uid_t user = geteuid());

 private:
  struct Offers {
    absl::Mutex mutex;
    std::vector<std::shared_ptr<const PeerHandles>> standing ABSL_GUARDED_BY(mutex);
  };
  struct Connection {
    ScopedDescriptor socket;
    absl::Time deadline;
  };

  HandleServer(Options options, std::string socket, ScopedDescriptor listener,
               ScopedDescriptor wake);
  void Run();
  void Accept();
  // Whatever the question is, the connection is over after it.
  void Answer(int socket);
  // A descriptor of the caller's own, so that an offer may be withdrawn meanwhile.
  absl::StatusOr<ScopedDescriptor> Find(const PeerAddress& asked, int32_t item) const;

  const Options options_;
  const std::string socket_;
  const ScopedDescriptor listener_;
  const ScopedDescriptor wake_;  // an eventfd: readable when the thread is to end
  const std::shared_ptr<Offers> offers_ = std::make_shared<Offers>();
  std::vector<Connection> connections_;  // the thread's own
  std::thread thread_;                   // last: starts when the rest is there
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_DOOR_H_
