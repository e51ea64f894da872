#include "worker/comm/wire/frame_reader.h"

namespace ringattn::worker {

FrameReader::Buffer FrameReader::Next() {
  if (payload_ != nullptr) return {payload_ + filled_, frame_.length - filled_};
  return {header_ + filled_, kFrameBytes - filled_};
}

absl::Status FrameReader::Advance(size_t bytes, FrameSink& sink) {
  filled_ += bytes;
  if (payload_ != nullptr) {
    if (filled_ < frame_.length) return absl::OkStatus();
    payload_ = nullptr;
    filled_ = 0;
    return sink.OnDataEnd(frame_);
  }
  if (filled_ < kFrameBytes) return absl::OkStatus();
  filled_ = 0;
  absl::StatusOr<WireFrame> frame = ParseFrame(header_);
  if (!frame.ok()) return frame.status();
  frame_ = *frame;
  if (frame_.kind == WireFrame::Kind::kGrant) return sink.OnGrant(frame_);
  return Resume(sink);
}

absl::Status FrameReader::Resume(FrameSink& sink) {
  absl::StatusOr<char*> target = sink.OnData(frame_);
  if (!target.ok()) return target.status();
  payload_ = *target;
  waits_memory_ = payload_ == nullptr;
  return absl::OkStatus();
}

}  // namespace ringattn::worker
