#include "common/wire/chunk_codec.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "absl/status/status.h"

namespace ringattn::wire {
namespace {

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLengthDelimited = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

// TensorChunk's fields.
constexpr uint32_t kTensorField = 1;
constexpr uint32_t kOffsetField = 2;
constexpr uint32_t kCrcField = 3;
constexpr uint32_t kDataField = 15;

// protobuf's own limit for nested groups.
constexpr int kMaxGroupDepth = 100;

absl::Status Malformed(absl::string_view what) { return absl::InvalidArgumentError(what); }

// --- Writing ----------------------------------------------------------------

class PrefixWriter {
 public:
  explicit PrefixWriter(ChunkPrefix* prefix) : prefix_(prefix) {}

  void Tag(uint32_t field, WireType type) { Varint(field << 3 | type); }

  void Varint(uint64_t value) {
    while (value >= 0x80) {
      Byte(static_cast<uint8_t>(value | 0x80));
      value >>= 7;
    }
    Byte(static_cast<uint8_t>(value));
  }

  void Fixed32(uint32_t value) {
    for (int shift = 0; shift < 32; shift += 8) Byte(static_cast<uint8_t>(value >> shift));
  }

 private:
  void Byte(uint8_t value) {
    assert(prefix_->size < ChunkPrefix::kMaxBytes);
    prefix_->bytes[prefix_->size++] = value;
  }

  ChunkPrefix* prefix_;
};

// --- Reading ----------------------------------------------------------------

// A position in the fragments and the number of bytes that may still be read from it. Copies are
// cheap, so each nested message has a separate Cursor.
class Cursor {
 public:
  explicit Cursor(absl::Span<const Fragment> fragments) : fragments_(fragments) {
    for (const Fragment& fragment : fragments_) left_ += fragment.size;
  }

  uint64_t left() const { return left_; }

  bool Byte(uint8_t* value) {
    if (left_ == 0) return false;
    while (at_ == fragments_[index_].size) NextFragment();
    *value = fragments_[index_].data[at_++];
    --left_;
    return true;
  }

  // At most max_bytes long. Discards bits beyond 64, as protobuf does.
  bool Varint(int max_bytes, uint64_t* value) {
    *value = 0;
    for (int i = 0; i < max_bytes; ++i) {
      uint8_t byte;
      if (!Byte(&byte)) return false;
      *value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) return true;
    }
    return false;
  }

  // Returns false for malformed tags, including field number 0.
  bool Tag(uint32_t* field, uint32_t* type) {
    uint64_t tag;
    if (!Varint(5, &tag)) return false;
    *field = static_cast<uint32_t>(tag) >> 3;
    *type = tag & 7;
    return *field != 0;
  }

  bool Fixed32(uint32_t* value) {
    *value = 0;
    for (int shift = 0; shift < 32; shift += 8) {
      uint8_t byte;
      if (!Byte(&byte)) return false;
      *value |= static_cast<uint32_t>(byte) << shift;
    }
    return true;
  }

  // Reads a length that fits into the remaining bytes.
  bool Length(uint64_t* length) { return Varint(5, length) && *length <= left_; }

  bool Skip(uint64_t bytes) {
    if (bytes > left_) return false;
    Advance(bytes, nullptr);
    return true;
  }

  // Appends the next `bytes` as fragments. REQUIRES: bytes <= left().
  void Take(uint64_t bytes, std::vector<Fragment>* taken) { Advance(bytes, taken); }

  // Returns a cursor over the next `bytes`, which this one skips.
  // REQUIRES: bytes <= left().
  Cursor Nested(uint64_t bytes) {
    Cursor nested = *this;
    nested.left_ = bytes;
    Advance(bytes, nullptr);
    return nested;
  }

 private:
  void NextFragment() {
    ++index_;
    at_ = 0;
  }

  void Advance(uint64_t bytes, std::vector<Fragment>* taken) {
    left_ -= bytes;
    while (bytes > 0) {
      const Fragment& fragment = fragments_[index_];
      const size_t here = std::min<uint64_t>(bytes, fragment.size - at_);
      if (taken != nullptr && here > 0) taken->push_back({fragment.data + at_, here});
      at_ += here;
      bytes -= here;
      if (bytes > 0) NextFragment();
    }
  }

  absl::Span<const Fragment> fragments_;
  size_t index_ = 0;
  size_t at_ = 0;  // in fragments_[index_]
  uint64_t left_ = 0;
};

// Skips one field's value. Iterative, because the sender chooses the depth of groups.
bool SkipValue(uint32_t field, uint32_t type, Cursor* cursor) {
  std::vector<uint32_t> open_groups;
  while (true) {
    uint64_t ignored;
    switch (type) {
      case kVarint:
        if (!cursor->Varint(10, &ignored)) return false;
        break;
      case kFixed64:
        if (!cursor->Skip(8)) return false;
        break;
      case kFixed32:
        if (!cursor->Skip(4)) return false;
        break;
      case kLengthDelimited:
        if (!cursor->Length(&ignored) || !cursor->Skip(ignored)) return false;
        break;
      case kStartGroup:
        if (open_groups.size() >= kMaxGroupDepth) return false;
        open_groups.push_back(field);
        break;
      case kEndGroup:
        if (open_groups.empty() || open_groups.back() != field) return false;
        open_groups.pop_back();
        break;
      default:
        return false;
    }
    if (open_groups.empty()) return true;
    if (!cursor->Tag(&field, &type)) return false;
  }
}

// Merges the fields of one occurrence of the chunk; the last value of each field wins.
absl::Status ParseChunk(Cursor cursor, ParsedMessage* parsed) {
  while (cursor.left() > 0) {
    uint32_t field, type;
    if (!cursor.Tag(&field, &type)) return Malformed("chunk: malformed tag");
    uint64_t value;
    if (field == kTensorField && type == kVarint) {
      if (!cursor.Varint(10, &value)) return Malformed("chunk: malformed tensor");
      parsed->chunk.tensor = static_cast<int32_t>(value);
    } else if (field == kOffsetField && type == kVarint) {
      if (!cursor.Varint(10, &value)) return Malformed("chunk: malformed offset");
      parsed->chunk.offset = value;
    } else if (field == kCrcField && type == kFixed32) {
      uint32_t crc;
      if (!cursor.Fixed32(&crc)) return Malformed("chunk: malformed crc32c");
      parsed->chunk.crc32c = crc;
    } else if (field == kDataField && type == kLengthDelimited) {
      if (!cursor.Length(&value)) return Malformed("chunk: data ends early");
      parsed->payload.clear();
      cursor.Take(value, &parsed->payload);
      parsed->payload_bytes = value;
    } else if (!SkipValue(field, type, &cursor)) {
      return Malformed("chunk: malformed field");
    }
  }
  return absl::OkStatus();
}

}  // namespace

ChunkPrefix EncodeChunkPrefix(const StreamMessage& type, const ChunkHeader& header,
                              uint64_t payload_bytes) {
  assert(payload_bytes < (uint64_t{1} << 31) - ChunkPrefix::kMaxBytes);
  // Omits fields with default values, as protobuf does.
  ChunkPrefix fields;
  PrefixWriter inner(&fields);
  if (header.tensor != 0) {
    inner.Tag(kTensorField, kVarint);
    // Negative enum numbers are sign-extended to 64 bits on the wire.
    inner.Varint(static_cast<uint64_t>(static_cast<int64_t>(header.tensor)));
  }
  if (header.offset != 0) {
    inner.Tag(kOffsetField, kVarint);
    inner.Varint(header.offset);
  }
  if (header.crc32c.has_value()) {
    inner.Tag(kCrcField, kFixed32);
    inner.Fixed32(*header.crc32c);
  }
  if (payload_bytes != 0) {
    inner.Tag(kDataField, kLengthDelimited);
    inner.Varint(payload_bytes);
  }

  ChunkPrefix prefix;
  PrefixWriter outer(&prefix);
  outer.Tag(static_cast<uint32_t>(type.chunk_field), kLengthDelimited);
  outer.Varint(fields.size + payload_bytes);
  assert(prefix.size + fields.size <= ChunkPrefix::kMaxBytes);
  std::memcpy(prefix.bytes.data() + prefix.size, fields.bytes.data(), fields.size);
  prefix.size += fields.size;
  return prefix;
}

ChunkPrefix EncodeFieldPrefix(int field, uint64_t bytes) {
  ChunkPrefix prefix;
  PrefixWriter writer(&prefix);
  writer.Tag(static_cast<uint32_t>(field), kLengthDelimited);
  writer.Varint(bytes);
  return prefix;
}

absl::StatusOr<ParsedMessage> ParseMessage(const StreamMessage& type,
                                           absl::Span<const Fragment> message) {
  ParsedMessage parsed;
  Cursor cursor(message);
  while (cursor.left() > 0) {
    uint32_t field, wire_type;
    if (!cursor.Tag(&field, &wire_type)) return Malformed("message: malformed tag");
    const bool is_member = field >= static_cast<uint32_t>(type.first_member) &&
                           field <= static_cast<uint32_t>(type.last_member);
    if (wire_type != kLengthDelimited || !is_member) {
      if (!SkipValue(field, wire_type, &cursor)) return Malformed("message: malformed field");
      continue;
    }
    uint64_t length;
    if (!cursor.Length(&length)) return Malformed("message: field ends early");
    const int member = static_cast<int>(field);
    // In a oneof the last member wins; setting it clears the previous member.
    if (member != parsed.member) parsed = ParsedMessage{.member = member};
    Cursor nested = cursor.Nested(length);
    if (member != type.chunk_field) continue;
    parsed.is_chunk = true;
    if (absl::Status status = ParseChunk(nested, &parsed); !status.ok()) return status;
  }
  return parsed;
}

std::vector<Fragment> Subrange(absl::Span<const Fragment> fragments, uint64_t offset,
                               uint64_t bytes) {
  Cursor cursor(fragments);
  const bool inside = offset <= cursor.left() && bytes <= cursor.left() - offset;
  assert(inside);
  (void)inside;
  std::vector<Fragment> range;
  cursor.Skip(offset);
  cursor.Take(bytes, &range);
  return range;
}

void CopyFragments(absl::Span<const Fragment> fragments, void* target) {
  auto* out = static_cast<uint8_t*>(target);
  for (const Fragment& fragment : fragments) {
    if (fragment.size == 0) continue;
    std::memcpy(out, fragment.data, fragment.size);
    out += fragment.size;
  }
}

}  // namespace ringattn::wire
