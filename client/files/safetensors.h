// Tensors in files: the safetensors format (8 bytes of header length, a JSON header,
// then the tensors' bytes without holes), read and written through mappings so that a
// file larger than memory is no problem.
//
//   auto file = SafetensorsFile::Open("in.safetensors");
//   const TensorView* q = file->Find("q");
//
//   auto writer = SafetensorsWriter::Create("out.safetensors", {{"out", kF32, {1, 8}}}, {});
//   FillIn((*writer)->data("out"));
//   (*writer)->Commit();
#ifndef RINGATTN_CLIENT_FILES_SAFETENSORS_H_
#define RINGATTN_CLIENT_FILES_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/memory/page_toucher.h"

namespace ringattn::client {

// The format's element types.
enum class FileDType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};
absl::string_view FileDTypeName(FileDType dtype);  // "F32", "BF16", ...
std::optional<FileDType> FileDTypeFromName(absl::string_view name);
int64_t FileDTypeBytes(FileDType dtype);

// A header longer than this is refused, as by the format's own library.
inline constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;

// One tensor of a file. data points into the file's mapping, aligned to the element.
struct TensorView {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape = {};
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

struct SafetensorsContents {
  std::vector<TensorView> tensors;  // by name
  std::map<std::string, std::string> metadata;
};

// Reads a whole file's bytes; the views point into them.
// Errors: INVALID_ARGUMENT saying what is wrong and, where it concerns one, with
// which tensor: header length or JSON, unknown dtype, shape that overflows or does
// not fit its bytes, bytes out of range, overlapping, with holes or not aligned, a
// name given twice.
absl::StatusOr<SafetensorsContents> ParseSafetensors(absl::Span<const uint8_t> file);

// A file mapped for reading. Movable. Immutable, so thread safe.
// Another process that cuts the file short meanwhile ends this one with SIGBUS.
class SafetensorsFile {
 public:
  // Errors: NOT_FOUND, PERMISSION_DENIED and the like from the system;
  // ParseSafetensors' errors with the path in front.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const std::vector<TensorView>& tensors() const { return contents_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return contents_.metadata; }
  const TensorView* Find(absl::string_view name) const;  // null if there is none

  // Lets go of the pages read so far, so that a large file does not count as this
  // process's memory; they come back from the page cache when touched again.
  void ReleasePages() const;

 private:
  SafetensorsFile() = default;

  void* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  SafetensorsContents contents_;
};

struct TensorDeclaration {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;
};

// A file being written: declared first, then filled in any order through a shared
// mapping, so that the page cache holds it and not the process. The path shows nothing
// or its old content until Commit. Thread compatible; different tensors may be filled
// by different threads.
class SafetensorsWriter {
 public:
  // Reserves the file's space in the folder of `path`, nameless where the file system
  // can do that, else under a temporary name.
  // Errors: INVALID_ARGUMENT for a name given twice or a shape that overflows;
  // RESOURCE_EXHAUSTED without space; the system's other errors.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, std::vector<TensorDeclaration> tensors,
      const std::map<std::string, std::string>& metadata);

  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  ~SafetensorsWriter();  // without Commit nothing is left

  // The writable bytes of a declared tensor, zero at first; valid until Commit.
  // REQUIRES: `name` was declared.
  absl::Span<uint8_t> data(absl::string_view name);

  // As SafetensorsFile's; what was written stays written.
  void ReleasePages();

  // From now on a thread makes the pages ahead of whoever fills them in the file's order
  // (PageToucher). Once.
  void TouchAhead();
  // So much of the file has been filled by now, from its beginning. Thread safe.
  void NoteFilled(double share);

  // Gives the file its name. A process killed before leaves the old file; contents
  // reach the disk whenever the system writes them (no fsync).
  absl::Status Commit();

 private:
  SafetensorsWriter() = default;

  absl::Status OpenTemporary();

  std::string path_;
  std::string temporary_path_;  // empty while the file has no name
  int descriptor_ = -1;
  uint8_t* mapping_ = nullptr;
  size_t mapped_bytes_ = 0;
  std::map<std::string, absl::Span<uint8_t>, std::less<>> data_;
  std::optional<PageToucher> toucher_;  // of mapping_
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_FILES_SAFETENSORS_H_
