// PageToucher: populates the pages of a mapped file ahead of a writer that fills them in file
// order. Allocating a page in the file system takes about as long as receiving its bytes from the
// network.
// Tests: page_toucher_test.cc.
#ifndef RINGATTN_CLIENT_MEMORY_PAGE_TOUCHER_H_
#define RINGATTN_CLIENT_MEMORY_PAGE_TOUCHER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

#include "absl/types/span.h"

namespace ringattn::client {

// Thread safe. The pages stay in the page cache, outside this process, and keep their contents.
// Does nothing without Linux 5.14 or after an error of the file system.
class PageToucher {
 public:
  struct Options {
    // How far to run ahead of the writer. In calls of half a minute or more, the system would
    // otherwise write the pages to disk before they are filled, and then again.
    uint64_t ahead_bytes = uint64_t{512} << 20;
    uint64_t step_bytes = uint64_t{16} << 20;  // a multiple of the page size
  };

  // `mapping` consists of whole pages, is shared and writable, and outlives this object.
  PageToucher(absl::Span<uint8_t> mapping, const Options& options);
  explicit PageToucher(absl::Span<uint8_t> mapping) : PageToucher(mapping, Options()) {}
  ~PageToucher();

  PageToucher(const PageToucher&) = delete;
  PageToucher& operator=(const PageToucher&) = delete;

  // Reports that this share of the mapping has been filled; populating continues after it. Ignores
  // NaN and values below an earlier call's.
  void NoteFilled(double share);

 private:
  void Run();

  const absl::Span<uint8_t> mapping_;
  const Options options_;
  std::mutex mutex_;  // guards the next two
  uint64_t filled_bytes_ = 0;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;  // last, because it uses all of them
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_PAGE_TOUCHER_H_
