// Integers on the wire: little endian, independent of the machine.
#ifndef RINGATTN_WORKER_COMM_WIRE_WIRE_INTEGERS_H_
#define RINGATTN_WORKER_COMM_WIRE_WIRE_INTEGERS_H_

#include <cstdint>
#include <string>

namespace ringattn::worker {

inline void AppendInteger(uint64_t value, int bytes, std::string* text) {
  for (int i = 0; i < bytes; ++i) text->push_back(static_cast<char>(value >> (8 * i)));
}

inline uint64_t ReadInteger(const char* text, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) {
    value |= static_cast<uint64_t>(static_cast<uint8_t>(text[i])) << (8 * i);
  }
  return value;
}

}  // namespace ringattn::worker

#endif  // RINGATTN_WORKER_COMM_WIRE_WIRE_INTEGERS_H_
