// StallWatch: whether one party of a transfer, a member or the client, keeps others waiting.
#ifndef RINGATTN_SERVER_EDGE_DATA_STALL_WATCH_H_
#define RINGATTN_SERVER_EDGE_DATA_STALL_WATCH_H_

namespace ringattn::server {

// Looked at from time to time. No clock: who looks decides how often, and for how long a
// stall may last. Not thread safe.
class StallWatch {
 public:
  // It took or sent bytes.
  void Moved() { moved_ = true; }

  // `waited_for`: it has something to do. True if that was so at the last look as well and it
  // has not moved since: it is stalled.
  bool Look(bool waited_for) {
    const bool stalled = waited_for && !moved_;
    moved_ = !waited_for;
    return stalled;
  }

 private:
  bool moved_ = true;
};

}  // namespace ringattn::server

#endif  // RINGATTN_SERVER_EDGE_DATA_STALL_WATCH_H_
