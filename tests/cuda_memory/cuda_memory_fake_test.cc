// The client's GPU memory belongs to a fake driver (worker/testing/fake_cuda: libcuda.so.1) and is
// inaccessible to the host: an access other than the driver's copies or the worker's imports
// crashes. The kernels are the CPU's.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/api/client.h"
#include "client/api/cuda_region.h"
#include "client/api/error.h"
#include "client/api/region.h"
#include "client/cli/region_stage.h"
#include "client/memory/cuda_driver.h"
#include "common/base/version.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/edge/server.h"
#include "worker/comm/single_rank/single_rank_transport.h"
#include "worker/device/cpu/cpu_device.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/service/worker.h"
#include "worker/testing/fake_cuda/fake_vmm.h"

namespace ringattn {
namespace {

using client::BackwardArgs;
using client::BackwardResults;
using client::CallOptions;
using client::CallReport;
using client::CallResult;
using client::ConstBytes;
using client::CudaRegion;
using client::ForwardArgs;
using client::ForwardResults;
using client::MutableBytes;
using client::TransportPreference;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kSecret[] = "a secret of some length";
constexpr int kHeads = 2, kDim = 64;

// Loaded by its path first: the client then finds it by its name.
const bool driver_loaded = [] {
  return dlopen("worker/testing/fake_cuda/libcuda.so.1", RTLD_NOW | RTLD_LOCAL) != nullptr;
}();

enum class Takes { kNothing, kHost, kCuda };

// A coordinator and one worker.
class Service {
 public:
  explicit Service(Takes takes, bool on_cpu = false) {
    char name[] = "/tmp/cuda_memory_XXXXXX";
    folder_ = mkdtemp(name);
    server::ServerOptions options;
    options.listen = options.control_listen = "127.0.0.1:0";
    options.metrics_listen = "";
    options.secret = kSecret;
    options.core.version = kVersion;
    options.core.initial_generation = 1;
    options.core.forming_delay = absl::Milliseconds(20);
    auto server = server::Server::Start(std::move(options));
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    if (on_cpu) {
      device_ = std::make_unique<worker::CpuDevice>(1, 1 << 30);
    } else {
      auto device = worker::CudaDevice::Create({.device = 0, .pinned_pool_bytes = 32 << 20});
      EXPECT_TRUE(device.ok()) << device.status();
      device_ = *std::move(device);
    }
    worker::WorkerOptions work;
    work.name = "worker-0";
    work.coordinator = server_->addresses().control;
    work.secret = kSecret;
    work.metrics_listen = "";
    work.memory_limit_bytes = 1 << 30;
    if (takes != Takes::kNothing) {
      work.local_socket_path = absl::StrCat(folder_, "/w.sock");
      work.local_uids = {geteuid()};
    }
    if (takes == Takes::kCuda) work.max_imported_bytes = int64_t{1} << 40;
    auto worker = worker::Worker::Start(
        work, device_.get(), &transport_, [](const std::string&) {}, [](const std::string&) {});
    EXPECT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
  }
  ~Service() {
    worker_.reset();
    server_.reset();
    rmdir(folder_.c_str());
  }

  std::unique_ptr<client::Client> Connect() {
    auto connected = client::Client::Connect(server_->addresses().listen);
    EXPECT_TRUE(connected.ok()) << connected.status();
    for (int i = 0; i < 500; ++i) {
      const auto topology = (*connected)->GetTopology(absl::Seconds(5));
      if (topology.ok() && topology->state() == v1::RING_STATE_READY) break;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return *std::move(connected);
  }

 private:
  std::string folder_;
  std::unique_ptr<server::Server> server_;
  std::unique_ptr<worker::Device> device_;
  worker::SingleRankTransport transport_{absl::FailedPreconditionError("one worker")};
  std::unique_ptr<worker::Worker> worker_;
};

// A problem in host memory, with numbers in its inputs.
struct Problem {
  explicit Problem(uint64_t tokens) : bytes(tokens * kHeads * kDim * sizeof(float)) {
    shape.set_batch(1);
    shape.set_seq_len_q(tokens);
    shape.set_seq_len_kv(tokens);
    shape.set_num_heads(kHeads);
    shape.set_num_kv_heads(kHeads);
    shape.set_head_dim(kDim);
    for (std::vector<uint8_t>* tensor : {&q, &k, &v, &dout}) Fill(tensor);
    for (std::vector<uint8_t>* tensor : {&out, &dq, &dk, &dv}) tensor->assign(bytes, 0xee);
    lse.assign(tokens * kHeads * sizeof(float), 0xee);
  }

  void Fill(std::vector<uint8_t>* tensor) {
    tensor->resize(bytes);
    for (size_t at = 0; at < bytes; at += sizeof(float)) {
      const float number = static_cast<float>(++salt * 37 % 199) / 199.0f - 0.5f;
      std::memcpy(tensor->data() + at, &number, sizeof(number));
    }
  }

  ForwardArgs Args() const {
    ForwardArgs args;
    args.shape = shape;
    args.dtype = v1::DATA_TYPE_FLOAT32;
    args.options.set_causal(true);
    args.q = q;
    args.k = k;
    args.v = v;
    return args;
  }
  ForwardResults Results() {
    return {.out = MutableBytes(out.data(), out.size()),
            .lse = MutableBytes(lse.data(), lse.size())};
  }
  BackwardArgs BackArgs() const {
    BackwardArgs args;
    args.shape = shape;
    args.dtype = v1::DATA_TYPE_FLOAT32;
    args.options.set_causal(true);
    args.q = q;
    args.k = k;
    args.v = v;
    args.dout = dout;
    return args;
  }
  BackwardResults BackResults() {
    return {.dq = MutableBytes(dq.data(), dq.size()),
            .dk = MutableBytes(dk.data(), dk.size()),
            .dv = MutableBytes(dv.data(), dv.size())};
  }

  const size_t bytes;
  size_t salt = 0;
  v1::AttentionShape shape;
  std::vector<uint8_t> q, k, v, dout, out, lse, dq, dk, dv;
};

// Returns the results of the same request over the relay.
Problem Relayed(client::Client& client, uint64_t tokens) {
  Problem problem(tokens);
  const CallOptions relay{.transport = TransportPreference::kRelay};
  const auto forward = client.Forward(problem.Args(), problem.Results(), relay);
  EXPECT_TRUE(forward.ok()) << forward.status();
  const auto backward = client.Backward(problem.BackArgs(), problem.BackResults(), relay);
  EXPECT_TRUE(backward.ok()) << backward.status();
  return problem;
}

// Its tensors in a region, one after another.
class OnGpu {
 public:
  OnGpu(CudaRegion* region, Problem* problem) : region_(region), problem_(problem) {}

  // Copied there.
  ConstBytes In(const std::vector<uint8_t>& tensor) {
    const MutableBytes place = Place(tensor.size());
    const auto offset = static_cast<uint64_t>(place.data() - region_->memory().data());
    EXPECT_TRUE(region_->CopyIn(offset, tensor).ok());
    return place;
  }
  MutableBytes Place(size_t bytes) {
    const MutableBytes place(region_->memory().data() + end_, bytes);
    end_ += (bytes + 255) / 256 * 256;
    return place;
  }
  std::vector<uint8_t> Back(MutableBytes place) const {
    std::vector<uint8_t> bytes(place.size());
    const auto offset = static_cast<uint64_t>(place.data() - region_->memory().data());
    EXPECT_TRUE(region_->CopyOut(offset, MutableBytes(bytes.data(), bytes.size())).ok());
    return bytes;
  }

  ForwardArgs Args() {
    ForwardArgs args = problem_->Args();
    args.q = In(problem_->q);
    args.k = In(problem_->k);
    args.v = In(problem_->v);
    return args;
  }
  ForwardResults Results() {
    return {.out = Place(problem_->out.size()), .lse = Place(problem_->lse.size())};
  }

 private:
  CudaRegion* const region_;
  Problem* const problem_;
  uint64_t end_ = 512;
};

void ExpectForward(client::Client& client, CudaRegion* region, Problem& expected,
                   const CallOptions& options, v1::Transport transport, const char* reason) {
  OnGpu gpu(region, &expected);
  const ForwardArgs args = gpu.Args();
  const ForwardResults results = gpu.Results();
  const CallResult report = client.Forward(args, results, options);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->accepted.transport(), transport) << report->transport_reason;
  EXPECT_THAT(report->transport_reason, HasSubstr(reason));
  EXPECT_EQ(gpu.Back(results.out), expected.out);
  EXPECT_EQ(gpu.Back(results.lse), expected.lse);
}

class CudaMemoryTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(driver_loaded) << dlerror(); }
};

TEST_F(CudaMemoryTest, ForwardAndBackwardAreTheRelaysBitForBit) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  // 8 tokens would travel in the header.
  for (const uint64_t tokens : {8, 700}) {
    Problem expected = Relayed(*client, tokens);
    auto region = CudaRegion::Create(client.get(), 1, 16 << 20);  // a peer of the worker's
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_THAT((*region)->workers(), ElementsAre("worker-0"));
    EXPECT_EQ((*region)->trouble(), "");
    for (const TransportPreference wish :
         {TransportPreference::kAuto, TransportPreference::kCudaMemory}) {
      ExpectForward(
          *client, region->get(), expected,
          {.transport = wish, .transport_required = wish == TransportPreference::kCudaMemory},
          v1::TRANSPORT_CUDA_MEMORY, "CUDA memory: all members have the regions");
    }
    OnGpu gpu(region->get(), &expected);
    BackwardArgs args = expected.BackArgs();
    args.q = gpu.In(expected.q);
    args.k = gpu.In(expected.k);
    args.v = gpu.In(expected.v);
    args.dout = gpu.In(expected.dout);
    const BackwardResults results{.dq = gpu.Place(expected.bytes),
                                  .dk = gpu.Place(expected.bytes),
                                  .dv = gpu.Place(expected.bytes)};
    const CallResult report = client->Backward(args, results);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->accepted.transport(), v1::TRANSPORT_CUDA_MEMORY);
    EXPECT_EQ(gpu.Back(results.dq), expected.dq);
    EXPECT_EQ(gpu.Back(results.dk), expected.dk);
    EXPECT_EQ(gpu.Back(results.dv), expected.dv);
  }
}

TEST_F(CudaMemoryTest, AResidualNeedsOnlyItsOwnTensors) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  Problem expected = Relayed(*client, 300);
  auto region = CudaRegion::Create(client.get(), 0, 16 << 20);
  ASSERT_TRUE(region.ok()) << region.status();
  OnGpu gpu(region->get(), &expected);
  const ForwardArgs args = gpu.Args();
  const auto forward = client->Forward(args, gpu.Results(), {.retain = absl::Seconds(30)});
  ASSERT_TRUE(forward.ok()) << forward.status();
  ASSERT_NE(forward->residual_handle(), "") << forward->residual_reason();
  BackwardArgs back;
  back.shape = expected.shape;
  back.dtype = v1::DATA_TYPE_FLOAT32;
  back.options = args.options;
  back.residual_handle = forward->residual_handle();
  back.dout = gpu.In(expected.dout);
  const BackwardResults results{.dq = gpu.Place(expected.bytes),
                                .dk = gpu.Place(expected.bytes),
                                .dv = gpu.Place(expected.bytes)};
  const CallResult report = client->Backward(back, results);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->accepted.transport(), v1::TRANSPORT_CUDA_MEMORY) << report->transport_reason;
  EXPECT_EQ(gpu.Back(results.dq), expected.dq);
}

// A client that cannot use CUDA memory gets its results over another transport, with the reason.
TEST_F(CudaMemoryTest, WhereItIsNotTakenTensorsTakeAnotherWayWithTheReason) {
  for (const auto& [takes, on_cpu] :
       {std::pair(Takes::kHost, false), std::pair(Takes::kCuda, true)}) {
    Service service(takes, on_cpu);
    const auto client = service.Connect();
    Problem expected = Relayed(*client, 300);
    auto region = CudaRegion::Create(client.get(), 0, 16 << 20);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_THAT((*region)->workers(), IsEmpty());
    EXPECT_EQ((*region)->trouble(), "no connected worker takes CUDA memory (--local_memory)");
    for (const TransportPreference wish :
         {TransportPreference::kAuto, TransportPreference::kCudaMemory}) {
      ExpectForward(*client, region->get(), expected, {.transport = wish}, v1::TRANSPORT_RELAY,
                    "no connected worker takes CUDA memory (--local_memory)");
    }
    OnGpu gpu(region->get(), &expected);
    const CallResult refused = client->Forward(
        gpu.Args(), gpu.Results(),
        {.transport = TransportPreference::kCudaMemory, .transport_required = true});
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(client::DetailsOf(refused.status()).reason, "TRANSPORT_UNAVAILABLE");
    EXPECT_THAT(refused.status().message(), HasSubstr("takes CUDA memory"));
  }
}

TEST_F(CudaMemoryTest, OtherWaysAreTakenOnCopies) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  Problem expected = Relayed(*client, 300);
  auto region = CudaRegion::Create(client.get(), 0, 16 << 20);
  ASSERT_TRUE(region.ok()) << region.status();
  ExpectForward(*client, region->get(), expected, {.transport = TransportPreference::kRelay},
                v1::TRANSPORT_RELAY,
                "tensors in CUDA memory were copied through host memory: the caller chose another "
                "transport");
  ExpectForward(*client, region->get(), expected,
                {.transport = TransportPreference::kHostMemory, .transport_required = true},
                v1::TRANSPORT_HOST_MEMORY, "the caller chose another transport");
  // Some here, some there.
  OnGpu gpu(region->get(), &expected);
  ForwardArgs args = gpu.Args();
  args.k = expected.k;
  const ForwardResults results = gpu.Results();
  const CallResult mixed = client->Forward(args, results);
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  EXPECT_THAT(mixed->transport_reason, HasSubstr("not all tensors lie in CUDA memory"));
  EXPECT_GT(mixed->staged_bytes, 0u);
  EXPECT_EQ(gpu.Back(results.out), expected.out);
  const CallResult refused = client->Forward(
      args, results, {.transport = TransportPreference::kCudaMemory, .transport_required = true});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.status().message(), HasSubstr("k lies in"));
  // Nor do tensors of host memory become others because they are wished to be.
  Problem host(300);
  const CallResult not_there =
      client->Forward(host.Args(), host.Results(),
                      {.transport = TransportPreference::kCudaMemory, .transport_required = true});
  EXPECT_EQ(not_there.status().code(), absl::StatusCode::kFailedPrecondition);
  const CallResult anyway =
      client->Forward(host.Args(), host.Results(), {.transport = TransportPreference::kCudaMemory});
  ASSERT_TRUE(anyway.ok()) << anyway.status();
  EXPECT_EQ(host.out, expected.out);
}

TEST_F(CudaMemoryTest, WhatReachesBeyondItsRegionIsRefused) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  Problem problem(300);
  auto region = CudaRegion::Create(client.get(), 0, 1);  // 2 MiB
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ((*region)->memory().size(), size_t{2} << 20);
  ForwardArgs args = problem.Args();
  args.q = ConstBytes((*region)->memory().data() + (2 << 20) - 64, args.q.size());
  const CallResult refused = client->Forward(args, problem.Results());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("extends beyond its end"));
  EXPECT_EQ((*region)->CopyIn((2 << 20) - 1, ConstBytes(problem.q.data(), 2)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaMemoryTest, MemoryOfTheCallersIsAdopted) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  Problem expected = Relayed(*client, 300);
  // Made as PyTorch's expandable segments are: by the driver's own calls.
  const auto& driver = **client::CudaDriver::Load();
  client::cuda::AllocationProperties properties;
  const auto allocate = [&](client::cuda::Allocation* allocation) {
    client::cuda::Pointer pointer = 0;
    client::cuda::AccessDescription access;
    EXPECT_EQ(driver.MemCreate(allocation, 8 << 20, &properties, 0), 0);
    EXPECT_EQ(driver.MemAddressReserve(&pointer, 8 << 20, 0, 0, 0), 0);
    EXPECT_EQ(driver.MemMap(pointer, 8 << 20, 0, *allocation, 0), 0);
    EXPECT_EQ(driver.MemSetAccess(pointer, 8 << 20, &access, 1), 0);
    return pointer;
  };
  client::cuda::Allocation allocation = 0, closed = 0;
  const client::cuda::Pointer pointer = allocate(&allocation);
  auto* const data = reinterpret_cast<uint8_t*>(pointer) + 4096;
  {
    auto region = CudaRegion::Adopt(client.get(), data, (8 << 20) - 8192);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_THAT((*region)->workers(), ElementsAre("worker-0")) << (*region)->trouble();
    ExpectForward(*client, region->get(), expected, {}, v1::TRANSPORT_CUDA_MEMORY, "CUDA memory");
  }
  auto refused = CudaRegion::Adopt(client.get(), data, 8 << 20);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("extends beyond its allocation"));
  properties.handle_types = 0;
  auto* const private_data = reinterpret_cast<void*>(allocate(&closed));
  refused = CudaRegion::Adopt(client.get(), private_data, 4096);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("without CU_MEM_HANDLE_TYPE_POSIX"));
  refused = CudaRegion::Adopt(client.get(), expected.q.data(), 4096);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("is not CUDA memory"));
}

// As of two containers' processes number 1. That such memory can be mapped otherwise:
// cuda_imports_fake_test.
TEST_F(CudaMemoryTest, CudaMallocedMemoryOfAProcessWithTheWorkersNumberIsRefusedByName) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  Problem expected = Relayed(*client, 300);
  client::cuda::Pointer pointer = 0;
  ASSERT_EQ((*client::CudaDriver::Load())->MemAlloc(&pointer, 4 << 20), 0);
  auto region = CudaRegion::Adopt(client.get(), reinterpret_cast<void*>(pointer), 4 << 20);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_THAT((*region)->workers(), IsEmpty());
  EXPECT_THAT((*region)->trouble(), HasSubstr("both have process id"));
  ExpectForward(*client, region->get(), expected, {}, v1::TRANSPORT_RELAY, "both have process id");
  region = CudaRegion::CreateLinear(client.get(), 0, 4 << 20);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_THAT((*region)->trouble(), HasSubstr("both have process id"));
}

// With lse per document, some bytes belong to no worker: the client fills them on the GPU.
TEST_F(CudaMemoryTest, HolesOfLsePerDocumentAreFilledThere) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  Problem problem(300);
  for (const uint64_t begin : {0, 90, 300}) {
    problem.shape.mutable_packed()->add_cu_seqlens_q(begin);
    problem.shape.mutable_packed()->add_cu_seqlens_k(begin);
  }
  problem.lse.assign(size_t{2} * kHeads * 210 * sizeof(float), 0xee);
  ForwardArgs args = problem.Args();
  args.lse_format = v1::LSE_FORMAT_PER_DOCUMENT;
  const auto relayed =
      client->Forward(args, problem.Results(), {.transport = TransportPreference::kRelay});
  ASSERT_TRUE(relayed.ok()) << relayed.status();
  auto region = CudaRegion::Create(client.get(), 0, 16 << 20);
  ASSERT_TRUE(region.ok()) << region.status();
  OnGpu gpu(region->get(), &problem);
  ForwardArgs there = gpu.Args();
  there.lse_format = v1::LSE_FORMAT_PER_DOCUMENT;
  const ForwardResults results = gpu.Results();
  const CallResult report = client->Forward(there, results);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->accepted.transport(), v1::TRANSPORT_CUDA_MEMORY);
  EXPECT_EQ(gpu.Back(results.lse), problem.lse);
  float hole = 0;
  std::memcpy(&hole, problem.lse.data() + 200 * sizeof(float), sizeof(hole));
  EXPECT_EQ(hole, -std::numeric_limits<float>::infinity());
}

// What `ringattn forward --transport=cuda_memory` does with tensors of files.
TEST_F(CudaMemoryTest, TheCommandLinePutsTensorsThere) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  const Problem expected = Relayed(*client, 300);
  Problem problem(300);
  CallOptions options;
  client::cli::SetTransport("cuda_memory", &options);
  const auto call = [&](const ForwardArgs& args, const ForwardResults& results) {
    return client->Forward(args, results, options);
  };
  const CallResult report = client::cli::CallStaged(client.get(), problem.Args(), problem.Results(),
                                                    options, {.device = 2}, call);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->accepted.transport(), v1::TRANSPORT_CUDA_MEMORY);
  EXPECT_EQ(problem.out, expected.out);
  EXPECT_EQ(problem.lse, expected.lse);
  // One process has one number.
  const CallResult refused =
      client::cli::CallStaged(client.get(), problem.Args(), problem.Results(), options,
                              {.device = 2, .memory = "malloc"}, call);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.status().message(), HasSubstr("both have process id"));
  const CallResult no_gpu = client::cli::CallStaged(client.get(), problem.Args(), problem.Results(),
                                                    options, {.device = 7}, call);
  EXPECT_EQ(no_gpu.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CudaMemoryTest, RegionsLeaveNothing) {
  Service service(Takes::kCuda);
  const auto client = service.Connect();
  EXPECT_EQ(CudaRegion::Create(client.get(), 0, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto no_device = CudaRegion::Create(client.get(), 3, 1);
  EXPECT_EQ(no_device.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(no_device.status().message(),
              HasSubstr("device: is 3; this process can use 3 CUDA devices"));
  EXPECT_EQ(CudaRegion::Create(client.get(), 0, int64_t{2} << 40).status().code(),
            absl::StatusCode::kResourceExhausted);
  const int mappings = FakeVmm().mappings, handles = FakeVmm().handles;
  for (int i = 0; i < 20; ++i) {
    auto region = CudaRegion::Create(client.get(), 0, 1);
    ASSERT_TRUE(region.ok()) << region.status();
    ASSERT_THAT((*region)->workers(), ElementsAre("worker-0"));
  }
  for (int i = 0; i < 500 && FakeVmm().mappings > mappings; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(FakeVmm().mappings, mappings);
  EXPECT_EQ(FakeVmm().handles, handles);
}

}  // namespace
}  // namespace ringattn
