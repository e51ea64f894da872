#include "client/files/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ringattn::client {
namespace {

absl::Status SystemError(int error, absl::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrCat(path, ": ", what));
}

std::string TemporaryName(const std::string& path) {
  return absl::StrCat(path, ".", getpid(), ".", absl::Hex(std::random_device()()), ".tmp");
}

// Closes the descriptor at the end of the scope; a mapping outlives it.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const Descriptor descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (descriptor.get() < 0) return SystemError(errno, "cannot open", path);
  struct stat info;
  if (fstat(descriptor.get(), &info) != 0) return SystemError(errno, "cannot stat", path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  SafetensorsFile file;
  if (info.st_size > 0) {
    void* mapping = mmap(nullptr, info.st_size, PROT_READ, MAP_SHARED, descriptor.get(), 0);
    if (mapping == MAP_FAILED) return SystemError(errno, "cannot map", path);
    file.mapping_ = mapping;
    file.mapped_bytes_ = info.st_size;
  }
  auto contents =
      ParseSafetensors({static_cast<const uint8_t*>(file.mapping_), file.mapped_bytes_});
  if (!contents.ok()) {
    return absl::Status(contents.status().code(),
                        absl::StrCat(path, ": ", contents.status().message()));
  }
  file.contents_ = *std::move(contents);
  return file;
}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  std::swap(contents_, other.contents_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
}

const TensorView* SafetensorsFile::Find(absl::string_view name) const {
  for (const TensorView& tensor : contents_.tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

void SafetensorsFile::SetElements(absl::string_view name, FileDType dtype,
                                  std::unique_ptr<uint8_t[]> data) {
  for (TensorView& tensor : contents_.tensors) {
    if (tensor.name != name) continue;
    const int64_t elements = tensor.bytes / FileDTypeBytes(tensor.dtype);
    tensor.dtype = dtype;
    tensor.data = data.get();
    tensor.bytes = elements * FileDTypeBytes(dtype);
    contents_.copies.push_back(std::move(data));
  }
}

void SafetensorsFile::ReleasePages() const {
  if (mapping_ != nullptr) madvise(mapping_, mapped_bytes_, MADV_DONTNEED);
}

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, std::vector<TensorDeclaration> tensors,
    const std::map<std::string, std::string>& metadata) {
  // Widest elements first, which keeps every tensor aligned without holes.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return FileDTypeBytes(a.dtype) > FileDTypeBytes(b.dtype);
  });

  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  uint64_t data_bytes = 0;
  for (const TensorDeclaration& tensor : tensors) {
    uint64_t bytes = FileDTypeBytes(tensor.dtype);
    uint64_t end;
    bool overflow = false;
    for (const int64_t dimension : tensor.shape) {
      overflow |=
          dimension < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(dimension), &bytes);
    }
    overflow |= __builtin_add_overflow(data_bytes, bytes, &end);
    // The largest file offset, minus room for the header.
    if (overflow || end > (uint64_t{1} << 62)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor \"", tensor.name, "\": shape overflows"));
    }
    if (tensor.name == "__metadata__" || header.contains(tensor.name)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor \"", tensor.name, "\": the name is used twice"));
    }
    header[tensor.name] = {{"dtype", std::string(FileDTypeName(tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {data_bytes, end}}};
    ranges.emplace_back(data_bytes, end);
    data_bytes = end;
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');

  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter());
  writer->path_ = path;
  if (absl::Status status = writer->OpenTemporary(); !status.ok()) return status;
  const uint64_t file_bytes = 8 + text.size() + data_bytes;
  // Reserve the space instead of leaving holes: a full disk is then an error here and not a SIGBUS
  // later.
  if (const int error = posix_fallocate(writer->descriptor_, 0, file_bytes); error != 0) {
    return SystemError(error, absl::StrCat("cannot reserve ", file_bytes, " bytes"), path);
  }
  void* mapping =
      mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, writer->descriptor_, 0);
  if (mapping == MAP_FAILED) return SystemError(errno, "cannot map", path);
  writer->mapping_ = static_cast<uint8_t*>(mapping);
  writer->mapped_bytes_ = file_bytes;

  for (int i = 0; i < 8; ++i) {
    writer->mapping_[i] = static_cast<uint8_t>(static_cast<uint64_t>(text.size()) >> (8 * i));
  }
  std::memcpy(writer->mapping_ + 8, text.data(), text.size());
  uint8_t* data = writer->mapping_ + 8 + text.size();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [begin, end] = ranges[i];
    writer->data_[tensors[i].name] = absl::MakeSpan(data + begin, end - begin);
  }
  return writer;
}

absl::Span<uint8_t> SafetensorsWriter::data(absl::string_view name) {
  const auto found = data_.find(name);
  assert(found != data_.end());
  return found->second;
}

absl::Status SafetensorsWriter::OpenTemporary() {
  // A file without a name disappears even if this process is killed.
  const size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  descriptor_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
  if (descriptor_ >= 0) return absl::OkStatus();
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) {
    return SystemError(errno, "cannot create", path_);
  }
  // Some file systems do not support files without a name.
  temporary_path_ = TemporaryName(path_);
  descriptor_ = open(temporary_path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ >= 0) return absl::OkStatus();
  const int error = errno;
  temporary_path_.clear();
  return SystemError(error, "cannot create", path_);
}

void SafetensorsWriter::ReleasePages() {
  // The mapping is shared, so dirty pages stay in the page cache.
  if (mapping_ != nullptr) madvise(mapping_, mapped_bytes_, MADV_DONTNEED);
}

void SafetensorsWriter::TouchAhead() { toucher_.emplace(absl::MakeSpan(mapping_, mapped_bytes_)); }

void SafetensorsWriter::NoteFilled(double share) {
  if (toucher_.has_value()) toucher_->NoteFilled(share);
}

absl::Status SafetensorsWriter::Commit() {
  toucher_.reset();
  munmap(mapping_, mapped_bytes_);
  mapping_ = nullptr;
  data_.clear();
  if (temporary_path_.empty()) {
    // linkat cannot replace a file; rename can.
    temporary_path_ = TemporaryName(path_);
    const std::string self = absl::StrCat("/proc/self/fd/", descriptor_);
    if (linkat(AT_FDCWD, self.c_str(), AT_FDCWD, temporary_path_.c_str(), AT_SYMLINK_FOLLOW) != 0) {
      const int error = errno;
      temporary_path_.clear();
      return SystemError(error, "cannot give the file its name", path_);
    }
  }
  if (rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    return SystemError(errno, "cannot rename the file", path_);
  }
  temporary_path_.clear();
  return absl::OkStatus();
}

SafetensorsWriter::~SafetensorsWriter() {
  toucher_.reset();
  if (mapping_ != nullptr) munmap(mapping_, mapped_bytes_);
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_path_.empty()) unlink(temporary_path_.c_str());
}

}  // namespace ringattn::client
