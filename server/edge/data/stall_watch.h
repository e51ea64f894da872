// StallWatch: detects whether one party of a transfer, a member or the client, holds it up.
#ifndef RINGATTN_SERVER_EDGE_DATA_STALL_WATCH_H_
#define RINGATTN_SERVER_EDGE_DATA_STALL_WATCH_H_

namespace ringattn::server {

// Polled periodically. It has no clock; the caller decides the interval and the tolerated stall.
// Not thread safe.
class StallWatch {
 public:
  // The party took or sent bytes.
  void Moved() { moved_ = true; }

  // `waited_for`: the party has something to do. Returns true if that was also so at the last look
  // and the party has not moved since.
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
