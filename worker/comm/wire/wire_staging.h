// WireStaging: host memory between connections and transfers in the memory of a device. A chunk is
// copied from the device into a slot before it is sent, and from a slot to the device after it has
// arrived.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_STAGING_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_STAGING_H_

#include "absl/status/status.h"
#include "common/program/lane.h"
#include "worker/comm/wire/wire_group.h"

namespace ringattn::worker {

// A chunk of a transfer that is copied between the device and a slot.
struct WireCopy {
  WireChunk chunk;  // a receive's has no transfer and no data
  char* device = nullptr;
  char* slot = nullptr;  // of kChunkBytes bytes
  int peer = 0;
};

// Called with the engine's mutex held, on any thread: must not call the engine and must not block.
class WireStaging {
 public:
  virtual ~WireStaging() = default;

  // There may be a chunk to copy out of the device (WireEngine::TakeCopy).
  virtual void OnSends() = 0;
  // Returns a free slot for a chunk that arrives; null if there is none.
  virtual char* TakeReceiveSlot() = 0;
  // The chunk is in the slot. Must be copied to the device and passed to WireEngine::EndReceive.
  virtual void OnReceived(const WireCopy& copy) = 0;
  // The slots are free again.
  virtual void ReturnReceiveSlot(char* slot) = 0;
  virtual void ReturnSendSlot(char* slot) = 0;
  // The lane's group has ended, and no copy for it is in progress.
  virtual void OnGroupEnd(Lane lane, const absl::Status& status) = 0;
};

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_STAGING_H_
