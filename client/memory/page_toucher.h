// PageToucher: makes a mapped file's pages ahead of whoever fills them in the file's order, as the
// file system takes about as long to make room for a page as the network for its bytes.
#ifndef RINGATTN_CLIENT_MEMORY_PAGE_TOUCHER_H_
#define RINGATTN_CLIENT_MEMORY_PAGE_TOUCHER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

#include "absl/types/span.h"

namespace ringattn::client {

// Thread safe. The pages wait in the page cache, not in this process, and hold what they held.
// Without Linux 5.14, or where the file system fails, nothing happens.
class PageToucher {
 public:
  struct Options {
    // Pages that are this far ahead wait: in a call of half a minute and more the system would
    // write them to the disk before they are filled, and then once more.
    uint64_t ahead_bytes = uint64_t{512} << 20;
    uint64_t step_bytes = uint64_t{16} << 20;  // multiple of a page's size
  };

  // `mapping`, of whole pages from its first byte on, is shared and writable, and outlives this.
  PageToucher(absl::Span<uint8_t> mapping, const Options& options);
  explicit PageToucher(absl::Span<uint8_t> mapping) : PageToucher(mapping, Options()) {}
  ~PageToucher();

  PageToucher(const PageToucher&) = delete;
  PageToucher& operator=(const PageToucher&) = delete;

  // The first so many bytes have been filled by now; it goes on behind them. Less than an earlier
  // call's, or no number at all, changes nothing.
  void NoteFilled(double share);

 private:
  void Run();

  const absl::Span<uint8_t> mapping_;
  const Options options_;
  std::mutex mutex_;  // the next two
  uint64_t filled_bytes_ = 0;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;  // last: it uses all of them
};

}  // namespace ringattn::client

#endif  // RINGATTN_CLIENT_MEMORY_PAGE_TOUCHER_H_
