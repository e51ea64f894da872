#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/device/device_wrapper.h"
#include "worker/device/host_event.h"
#include "worker/device/staging.h"

namespace ringattn::worker {
namespace {

// Counts copies, and has no staging memory.
class CountingDevice : public DeviceWrapper {
 public:
  using DeviceWrapper::DeviceWrapper;
  absl::Status CopyFromHost(void* device, const void* host, int64_t bytes) override {
    ++copies;
    if (copies == fail_at) return absl::InternalError("the copy failed");
    std::memcpy(device, host, bytes);
    return absl::OkStatus();
  }
  absl::StatusOr<EventRef> StartCopyFromHost(void* device, const void* host,
                                             int64_t bytes) override {
    absl::Status status = CopyFromHost(device, host, bytes);
    if (!status.ok()) return status;
    started.push_back(std::make_shared<HostEvent>());
    return started.back();
  }
  absl::StatusOr<std::unique_ptr<Upload>> BeginUpload(std::vector<UploadTarget>) override {
    return absl::UnavailableError("no staging memory");
  }

  int copies = 0;
  std::vector<EventRef> started;
  int fail_at = 0;
};

TEST(SmallUpload, CopiesEachTargetOnce) {
  CountingDevice device(nullptr);
  std::string a(5, '-'), b(3, '-'), c(4, '-');
  auto upload =
      MakeSmallUpload(&device, {{a.data(), 5}, {b.data(), 3}, {nullptr, 0}, {c.data(), 4}});
  for (const char* piece : {"01", "2", "34567", "89", "AB"}) {
    ASSERT_TRUE(upload->Append(piece, std::strlen(piece)).ok());
  }
  const auto events = upload->Finish();
  ASSERT_TRUE(events.ok());
  // The upload keeps what it gathers, so it waits for those copies.
  EXPECT_EQ(device.started.size(), 1u);
  EXPECT_EQ(*events, device.started);
  EXPECT_EQ(a + b + c, "0123456789AB");
  EXPECT_EQ(device.copies, 3);
}

TEST(SmallUpload, ReportsTheDevicesError) {
  CountingDevice device(nullptr);
  device.fail_at = 2;
  std::string a(2, '-'), b(2, '-');
  auto upload = MakeSmallUpload(&device, {{a.data(), 2}, {b.data(), 2}});
  const absl::Status status = upload->Append("0123", 4);
  EXPECT_EQ(status.message(), "the copy failed");
  EXPECT_EQ(a, "01");
}

}  // namespace
}  // namespace ringattn::worker
