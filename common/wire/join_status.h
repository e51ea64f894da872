// Reasons with which the coordinator ends a worker's control stream.
#ifndef RINGATTN_COMMON_WIRE_JOIN_STATUS_H_
#define RINGATTN_COMMON_WIRE_JOIN_STATUS_H_

namespace ringattn {

// The reason in Leave if another stream registered the worker's name. Workers then wait longer
// before they reconnect, so that two processes of one name do not replace each other continuously.
inline constexpr char kNameJoinedAgain[] = "its name joined again";

// The reason in Leave if the coordinator shuts down, and the message of the stream's status.
// Workers then reconnect, without warnings for as long as a restart takes.
inline constexpr char kCoordinatorEnds[] = "the coordinator is shutting down";

}  // namespace ringattn

#endif  // RINGATTN_COMMON_WIRE_JOIN_STATUS_H_
