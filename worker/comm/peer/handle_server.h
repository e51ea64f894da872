// HandleServer: the Unix socket through which a rank passes its segment and regions to the other
// ranks of its ring, as file descriptors. Unlike paths under /proc and CUDA's legacy handles,
// descriptors work across all namespaces.
//
// A connection carries one request and its reply. The request contains the token that the rank has
// put into its blob for this generation; only members of the ring see blobs. Both ends reject
// processes of other users.
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

// The item number of the segment. Regions have their index in the rank's table as item number.
inline constexpr int32_t kPeerSegmentItem = -1;

// The handles that a rank shares while it is a member of one generation.
struct PeerHandles {
  uint64_t generation = 0;
  std::string token;  // kTokenBytes
  int segment = -1;   // owned by the caller, who keeps it open while it is published
  DeviceRegions regions;
};

// Address of another rank's server, and the credentials for it.
struct PeerAddress {
  std::string socket;
  uint64_t generation = 0;
  std::string token;
};

// Thread safe.
class HandleServer {
 public:
  struct Options {
    // Folder of the socket, whose name is unique. All ranks must see the folder under the same
    // path. Empty: an abstract name in the network namespace instead of a file.
    std::string folder;
    uid_t user = geteuid();  // the user whose processes are accepted
    absl::Duration request_timeout = absl::Seconds(5);
    size_t max_waiting = 64;  // connections without a request; the oldest is evicted
  };
  // Starts the server. Removes socket files of dead servers from the folder. Returns
  // FAILED_PRECONDITION if it cannot listen.
  static absl::StatusOr<std::unique_ptr<HandleServer>> Open(Options options);
  // Stops serving everything published.
  ~HandleServer();
  HandleServer(const HandleServer&) = delete;
  HandleServer& operator=(const HandleServer&) = delete;

  // See PeerAddress::socket.
  const std::string& socket() const { return socket_; }

  // Publishes the handles until the returned object is destroyed; after that, nothing is served for
  // their token. The object may outlive the server.
  std::shared_ptr<const void> Publish(PeerHandles handles);

  // Requests `item` from another rank's server. Blocks until `deadline`, or until `stop` (may be
  // null, polled every 20 ms) returns true. The caller owns the descriptor. Errors:
  //   UNAVAILABLE          the rank is gone or has left the ring
  //   FAILED_PRECONDITION  its socket is not visible here, or either process has another user
  //   INTERNAL             the rank has no such region
  //   CANCELLED            `stop` returned true
  static absl::StatusOr<ScopedDescriptor> Fetch(const PeerAddress& from, int32_t item,
                                                absl::Time deadline,
                                                const std::function<bool()>& stop = nullptr,
                                                uid_t user = geteuid());

 private:
  struct Published {
    absl::Mutex mutex;
    std::vector<std::shared_ptr<const PeerHandles>> handles ABSL_GUARDED_BY(mutex);
  };
  struct Connection {
    ScopedDescriptor socket;
    absl::Time deadline;
  };

  HandleServer(Options options, std::string socket, ScopedDescriptor listener,
               ScopedDescriptor wake);
  void Run();
  void Accept();
  // Reads a request and replies. The connection is closed afterwards in any case.
  void HandleRequest(int socket);
  // Returns a duplicate of the descriptor, so that the handles may be unpublished meanwhile.
  absl::StatusOr<ScopedDescriptor> Find(const PeerAddress& asked, int32_t item) const;

  const Options options_;
  const std::string socket_;
  const ScopedDescriptor listener_;
  const ScopedDescriptor wake_;  // an eventfd; readable when the thread should end
  const std::shared_ptr<Published> published_ = std::make_shared<Published>();
  std::vector<Connection> connections_;  // used by the thread only
  std::thread thread_;                   // last: starts when the other members exist
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_PEER_PEER_DOOR_H_
