// The StepHello of a direct stream, in the call's initial metadata. A worker checks its token
// before it reads a message, because a message may have Limits.max_step_bytes.
#ifndef RINGATTN_COMMON_KV_STEP_METADATA_H_
#define RINGATTN_COMMON_KV_STEP_METADATA_H_

namespace ringattn {

// The value is a serialized StepHello. "-bin": gRPC permits arbitrary bytes in the value.
inline constexpr char kStepHelloMetadataKey[] = "ringattn-steps-bin";

}  // namespace ringattn

#endif  // RINGATTN_COMMON_KV_STEP_METADATA_H_
