#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/files/safetensors.h"
#include "nlohmann/json.hpp"

namespace ringattn::client {
namespace {

// Far above real files. Bounds how much a hostile header can make us allocate per byte.
constexpr size_t kMaxDimensions = 32;
constexpr size_t kMaxEchoedBytes = 64;

std::string Quoted(absl::string_view name) {
  if (name.size() <= kMaxEchoedBytes) return absl::StrCat("\"", name, "\"");
  return absl::StrCat("\"", name.substr(0, kMaxEchoedBytes), "...\"");
}

struct RawTensor {
  std::string name;
  std::optional<FileDType> dtype = std::nullopt;
  std::optional<std::vector<uint64_t>> shape = std::nullopt;
  std::optional<std::vector<uint64_t>> offsets = std::nullopt;
};

// Builds the header's tensors while the JSON is being read. Accepts only the format's own
// structure, so it never holds anything else in memory.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<RawTensor> tensors;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool start_object(size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kRoot;
        return true;
      case State::kRootValue:
        state_ = in_metadata_ ? State::kMetadata : State::kTensor;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool end_object() override {
    if (state_ == State::kRoot) {
      state_ = State::kEnd;
      return true;
    }
    state_ = State::kRoot;
    return true;
  }

  bool key(string_t& name) override {
    switch (state_) {
      case State::kRoot:
        if (!names_.insert(name).second) return Fail(absl::StrCat(Quoted(name), " given twice"));
        in_metadata_ = name == "__metadata__";
        if (!in_metadata_) tensors.push_back({.name = name});
        state_ = State::kRootValue;
        return true;
      case State::kMetadata:
        metadata_key_ = name;
        if (!metadata.emplace(name, "").second) {
          return Fail(absl::StrCat("metadata ", Quoted(name), " given twice"));
        }
        state_ = State::kMetadataValue;
        return true;
      case State::kTensor:
        return TensorKey(name);
      default:
        return Unexpected("a key");
    }
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadataValue) {
      metadata[metadata_key_] = value;
      state_ = State::kMetadata;
      return true;
    }
    if (state_ != State::kDType) return Unexpected("a string");
    tensors.back().dtype = FileDTypeFromName(value);
    if (!tensors.back().dtype) {
      return Fail(absl::StrCat(InTensor(), "dtype is ", Quoted(value), ", must be one of ",
                               FileDTypeNames()));
    }
    state_ = State::kTensor;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kShape) {
      state_ = State::kShapeItems;
    } else if (state_ == State::kOffsets) {
      state_ = State::kOffsetItems;
    } else {
      return Unexpected("an array");
    }
    return true;
  }

  bool end_array() override {
    state_ = State::kTensor;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    std::vector<uint64_t>* items = nullptr;
    if (state_ == State::kShapeItems) items = &*tensors.back().shape;
    if (state_ == State::kOffsetItems) items = &*tensors.back().offsets;
    if (items == nullptr) return Unexpected("a number");
    if (items->size() >= kMaxDimensions) return Fail(absl::StrCat(InTensor(), "too many numbers"));
    items->push_back(value);
    return true;
  }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return Unexpected("a number that is not an integer");
  }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    return Fail(absl::StrCat("not valid JSON at byte ", position));
  }

 private:
  enum class State {
    kStart,
    kRoot,
    kRootValue,
    kMetadata,
    kMetadataValue,
    kTensor,
    kDType,
    kShape,
    kShapeItems,
    kOffsets,
    kOffsetItems,
    kEnd,
  };

  bool TensorKey(const std::string& name) {
    RawTensor& tensor = tensors.back();
    bool again = false;
    if (name == "dtype") {
      again = tensor.dtype.has_value();
      state_ = State::kDType;
    } else if (name == "shape") {
      again = tensor.shape.has_value();
      tensor.shape.emplace();
      state_ = State::kShape;
    } else if (name == "data_offsets") {
      again = tensor.offsets.has_value();
      tensor.offsets.emplace();
      state_ = State::kOffsets;
    } else {
      return Fail(absl::StrCat(InTensor(), Quoted(name),
                               " is not a field of a tensor; use dtype, shape and data_offsets"));
    }
    return !again || Fail(absl::StrCat(InTensor(), Quoted(name), " given twice"));
  }

  std::string InTensor() const {
    return absl::StrCat("tensor ", Quoted(tensors.back().name), ": ");
  }

  bool Fail(std::string message) {
    if (error.empty()) error = std::move(message);
    return false;
  }

  bool Unexpected(absl::string_view what) {
    const bool in_tensor = !tensors.empty() && !in_metadata_ && state_ != State::kStart;
    return Fail(absl::StrCat(in_tensor ? InTensor() : "", what,
                             " in a place where the format allows none"));
  }

  State state_ = State::kStart;
  bool in_metadata_ = false;
  std::string metadata_key_;
  std::set<std::string> names_;
};

absl::Status Invalid(absl::string_view message) { return absl::InvalidArgumentError(message); }

absl::StatusOr<TensorView> Check(const RawTensor& raw, absl::Span<const uint8_t> data) {
  const std::string where = absl::StrCat("tensor ", Quoted(raw.name), ": ");
  if (!raw.dtype) return Invalid(absl::StrCat(where, "dtype is missing"));
  if (!raw.shape) return Invalid(absl::StrCat(where, "shape is missing"));
  if (!raw.offsets) return Invalid(absl::StrCat(where, "data_offsets are missing"));
  if (raw.offsets->size() != 2) {
    return Invalid(absl::StrCat(where, "data_offsets need two numbers, not ", raw.offsets->size()));
  }
  const uint64_t begin = (*raw.offsets)[0], end = (*raw.offsets)[1];
  if (begin > end) return Invalid(absl::StrCat(where, "data_offsets end before they begin"));
  if (end > data.size()) {
    return Invalid(absl::StrCat(where, "data ends at byte ", end, " of ", data.size()));
  }

  TensorView view{.name = raw.name, .dtype = *raw.dtype};
  uint64_t bytes = FileDTypeBytes(view.dtype);
  for (const uint64_t dimension : *raw.shape) {
    if (dimension > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        __builtin_mul_overflow(bytes, dimension, &bytes)) {
      return Invalid(absl::StrCat(where, "shape overflows"));
    }
    view.shape.push_back(static_cast<int64_t>(dimension));
  }
  if (bytes != end - begin) {
    return Invalid(absl::StrCat(where, "shape needs ", bytes, " bytes, data has ", end - begin));
  }
  view.data = data.data() + begin;
  view.bytes = static_cast<int64_t>(bytes);
  return view;
}

// The format requires that every data byte belongs to exactly one tensor.
absl::Status CheckCoverage(const std::vector<TensorView>& tensors, absl::Span<const uint8_t> data) {
  std::vector<const TensorView*> by_position;
  for (const TensorView& tensor : tensors) by_position.push_back(&tensor);
  std::sort(by_position.begin(), by_position.end(), [](const auto* a, const auto* b) {
    return std::pair(a->data, a->bytes) < std::pair(b->data, b->bytes);
  });
  const uint8_t* covered = data.data();
  for (const TensorView* tensor : by_position) {
    if (tensor->data < covered) {
      return Invalid(absl::StrCat("tensor ", Quoted(tensor->name), ": data overlaps another's"));
    }
    if (tensor->data > covered) {
      return Invalid(absl::StrCat("a hole before the data of tensor ", Quoted(tensor->name)));
    }
    covered += tensor->bytes;
  }
  const uint64_t rest = data.data() + data.size() - covered;
  if (rest != 0) return Invalid(absl::StrCat(rest, " bytes after the last tensor"));
  return absl::OkStatus();
}

// The format does not require alignment, but readers of the views do.
void CopyUnaligned(SafetensorsContents& contents) {
  for (TensorView& tensor : contents.tensors) {
    if (reinterpret_cast<uintptr_t>(tensor.data) % FileDTypeBytes(tensor.dtype) == 0) continue;
    // Memory from new is aligned for every element type.
    auto copy = std::make_unique<uint8_t[]>(tensor.bytes);
    std::memcpy(copy.get(), tensor.data, tensor.bytes);
    tensor.data = copy.get();
    contents.copies.push_back(std::move(copy));
  }
}

}  // namespace

absl::StatusOr<SafetensorsContents> ParseSafetensors(absl::Span<const uint8_t> file) {
  if (file.size() < 8) {
    return Invalid(absl::StrCat("not a safetensors file: ", file.size(), " bytes are too short"));
  }
  uint64_t header_bytes = 0;
  for (int i = 0; i < 8; ++i) header_bytes |= static_cast<uint64_t>(file[i]) << (8 * i);
  // Do not report the first eight bytes of some other kind of file as a header length.
  if (header_bytes > file.size() - 8 && (file.size() == 8 || file[8] != '{')) {
    return Invalid("not a safetensors file: it does not begin with a header's length and \"{\"");
  }
  if (header_bytes > kMaxSafetensorsHeaderBytes) {
    return Invalid(absl::StrCat("header of ", header_bytes, " bytes, over the limit of ",
                                kMaxSafetensorsHeaderBytes));
  }
  if (header_bytes > file.size() - 8) {
    return Invalid(
        absl::StrCat("truncated: header of ", header_bytes, " bytes in a file of ", file.size()));
  }
  const absl::Span<const uint8_t> header = file.subspan(8, header_bytes);
  const absl::Span<const uint8_t> data = file.subspan(8 + header_bytes);
  if (header.empty() || header[0] != '{') {
    return Invalid("not a safetensors file: its header does not begin with \"{\"");
  }

  HeaderReader reader;
  if (!nlohmann::json::sax_parse(header.begin(), header.end(), &reader)) {
    return Invalid(absl::StrCat("header: ", reader.error));
  }
  SafetensorsContents contents;
  contents.metadata = std::move(reader.metadata);
  for (const RawTensor& raw : reader.tensors) {
    absl::StatusOr<TensorView> view = Check(raw, data);
    if (!view.ok()) return view.status();
    contents.tensors.push_back(*std::move(view));
  }
  if (absl::Status status = CheckCoverage(contents.tensors, data); !status.ok()) return status;
  CopyUnaligned(contents);
  std::sort(contents.tensors.begin(), contents.tensors.end(),
            [](const TensorView& a, const TensorView& b) { return a.name < b.name; });
  return contents;
}

}  // namespace ringattn::client
