// Checks the CUDA kernels on a GPU against common/oracle. The problems are random ones over every
// option, dtype and head-dim class, split into ring shards in several layouts, and scores of 1e4 to
// 1e36. It runs as many problems with score terms twice, which must give the same bits. It checks
// probabilities of chosen rows in half of all problems, and their cost compared with a forward;
// dropout's exact keep set; and, on compute capability 9.0, forwards in e4m3 and deterministic
// backwards.
//
//   cuda_kernels_test [--cases=N] [--seed=S] [--small] [--terms [--family=sm90]] [--fp8]
//       [--deterministic] [--wide]
//
// Exit code 0 iff all checks passed. --small: only tiny cases, for compute-sanitizer. --terms: only
// score terms, and their speed. --family=sm90: forces the kernels of that family. --fp8: only
// forwards in e4m3, which compute capability 9.0 supports; each runs twice. --deterministic: only
// deterministic backwards of plain problems; each runs twice, the second time while other work runs
// on the GPU. --wide: only head dims above 256, each twice, and their speed.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/attention/tensors.h"
#include "common/oracle/comparator.h"
#include "worker/kernels/cuda/check/controls.h"
#include "worker/kernels/cuda/check/guarded_buffer.h"
#include "worker/kernels/cuda/check/huge_scores.h"
#include "worker/kernels/cuda/check/judge_cases.h"
#include "worker/kernels/cuda/check/keep_sets.h"
#include "worker/kernels/cuda/check/probability_speed.h"
#include "worker/kernels/cuda/check/random_case.h"
#include "worker/kernels/cuda/check/run_case.h"
#include "worker/kernels/cuda/check/split_counts.h"
#include "worker/kernels/cuda/check/term_speed.h"
#include "worker/kernels/cuda/check/wide_speed.h"
#include "worker/kernels/cuda/cuda_kernels.h"

namespace ringattn::worker::cuda::check {
namespace {

constexpr int kMostFailures = 20;  // a run stops after this many

struct Arguments {
  int cases = 300;
  uint32_t seed = std::random_device()();
  bool small = false;
  bool terms = false;          // only score terms
  bool fp8 = false;            // only e4m3
  bool deterministic = false;  // only deterministic backwards
  bool wide = false;           // only head dims above 256
  std::string family;          // forced for score terms; empty: the exact family's kernels
};

constexpr char kExactFamily[] = "simt";

// Returns the family whose kernels with score terms are judged.
std::string TermFamily(const Arguments& arguments) {
  return arguments.family.empty() ? kExactFamily : arguments.family;
}

Arguments Parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--cases=", 8) == 0) {
      arguments.cases = std::atoi(argv[i] + 8);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      arguments.seed = std::strtoul(argv[i] + 7, nullptr, 10);
    } else if (std::strcmp(argv[i], "--small") == 0) {
      arguments.small = true;
    } else if (std::strcmp(argv[i], "--terms") == 0) {
      arguments.terms = true;
    } else if (std::strcmp(argv[i], "--fp8") == 0) {
      arguments.fp8 = true;
    } else if (std::strcmp(argv[i], "--deterministic") == 0) {
      arguments.deterministic = true;
    } else if (std::strcmp(argv[i], "--wide") == 0) {
      arguments.wide = true;
    } else if (std::strcmp(argv[i], "--family=sm90") == 0) {
      arguments.family = "sm90";
    } else {
      std::fprintf(stderr,
                   "cuda_kernels_test [--cases=N] [--seed=S] [--small] [--terms "
                   "[--family=sm90]] [--fp8] [--deterministic] [--wide]\n");
      std::exit(2);
    }
  }
  if (!arguments.family.empty() && !arguments.terms) {
    std::fprintf(stderr, "--family is of --terms\n");
    std::exit(2);
  }
  return arguments;
}

// The worst ratio of error to bound, by dtype and tensor.
class WorstRatios {
 public:
  void Add(DType dtype, const oracle::Report& report) {
    for (const oracle::TensorReport& tensor : report.tensors) {
      Ratios& worst = worst_[dtype][tensor.tensor];
      worst.element = std::max(worst.element, tensor.element.ratio());
      worst.norm = std::max(worst.norm, tensor.norm.ratio());
    }
  }
  void Print() const {
    for (const auto& [dtype, tensors] : worst_) {
      std::printf("%s: worst element error / bound (norm error / bound): ",
                  std::string(DTypeName(dtype)).c_str());
      for (const auto& [tensor, worst] : tensors) {
        std::printf("%s %.3f (%.3f)  ", TensorName(tensor), worst.element, worst.norm);
      }
      std::printf("\n");
    }
  }

 private:
  struct Ratios {
    double element = 0, norm = 0;
  };
  std::map<DType, std::map<TensorId, Ratios>> worst_;
};

using Draw = Case (*)(std::mt19937& random, bool small);  // a function of random_case.h

std::vector<Case> DrawCases(const Arguments& arguments, Draw draw) {
  std::mt19937 random(arguments.seed);
  std::vector<Case> cases;
  for (int i = 0; i < arguments.cases; ++i) cases.push_back(draw(random, arguments.small));
  return cases;
}

// Prints which cases fail, every hundredth case, and how close all cases came to their bounds.
// `kind` describes the cases. Returns the number of failures.
int Judge(const std::vector<Case>& cases, const DeviceInfo& device, const char* kind,
          const Repeats& repeats, SplitCounts& splits) {
  WorstRatios worst;
  int done = 0, failed = 0;
  JudgeCases(cases, device, repeats, splits, [&](const Case& c, const Judgement& judgement) {
    worst.Add(c.spec.dtype, judgement.report);
    if (!judgement.passed()) {
      ++failed;
      std::printf("FAILED %s\n%s", c.ToString().c_str(), judgement.ToString().c_str());
    }
    if (++done % 100 == 0) std::printf("%d %s done, %d failed\n", done, kind, failed);
    return failed <= kMostFailures;
  });
  worst.Print();
  return failed;
}

int CheckRandomCases(const Arguments& arguments, const DeviceInfo& device) {
  SplitCounts splits;
  int failed =
      Judge(DrawCases(arguments, RandomCase), device, "plain", /*repeats=*/nullptr, splits);
  // A run of this many cases contains every kind of split, unless splitting is broken.
  const bool complete = splits.Complete();
  if (arguments.cases >= 300 && !arguments.small && !complete) ++failed;
  for (const std::string family : {"sm90", "sm80", "simt"}) {
    if (arguments.cases < 100 || (family == "sm90" && device.compute_major != 9)) continue;
    for (const char* direction : {"forward", "backward"}) {
      if (splits.CallsOf(family, direction) > 0) continue;
      std::printf("FAILED: no %s by %s\n", direction, family.c_str());
      ++failed;
    }
  }
  for (const char* kind :
       {kStoring, kStoringGroups, kStoringDocuments, kStoringWindows, kStoringBlocks, kLateKeys}) {
    if (arguments.cases < 600 || device.compute_major != 9) break;
    if (splits.CallsOf("sm90", kind) > 0) continue;
    std::printf("FAILED: no %s by sm90\n", kind);
    ++failed;
  }
  std::printf("%d calls of probabilities of chosen rows\n",
              splits.CallsOf("simt", "probabilities"));
  if (arguments.cases >= 100 && splits.CallsOf("simt", "probabilities") == 0) {
    std::printf("FAILED: no probabilities\n");
    ++failed;
  }
  return failed;
}

// The directions that a run with terms must contain, each with its family; zeros have no family.
std::vector<std::pair<std::string, std::string>> TermKernelsOf(const std::string& family) {
  std::vector<std::pair<std::string, std::string>> kernels = {{family, "forward"},
                                                              {family, "backward"},
                                                              {family, "bias gradient"},
                                                              {"simt", "probabilities"},
                                                              {"", "partial zeros of dbias"}};
  if (family == "sm90") kernels.push_back({family, "backward with dbias"});
  return kernels;
}

// A run of this many cases also contains every direction with terms sharded by keys.
constexpr int kCasesByKeys = 300;

// Runs each case twice. The exact kernels and every forward must give the same bits.
int CheckTermCases(const Arguments& arguments, const DeviceInfo& device) {
  std::vector<Case> cases =
      DrawCases(arguments, arguments.family.empty() ? RandomTermCase : RandomHopperTermCase);
  if (arguments.family.empty()) {
    for (Case& c : cases) c.family = kExactFamily;  // also if tensor cores would serve it
  }
  const auto repeats = [](const Case& c, const CaseOutputs& first,
                          const std::function<CaseOutputs()>& run) {
    CaseOutputs again = run();
    if (c.family != kExactFamily) {  // the order of sums across thread blocks varies
      again.dq = first.dq;
      again.dk = first.dk;
      again.dv = first.dv;
    }
    return again == first;
  };
  SplitCounts splits;
  int failed = Judge(cases, device, "with terms", repeats, splits);
  for (const auto& [family, direction] : TermKernelsOf(TermFamily(arguments))) {
    std::printf("%d calls of %s with terms by %s\n", splits.CallsOf(family, direction),
                direction.c_str(), family.c_str());
    if (arguments.cases < 50 || splits.CallsOf(family, direction) > 0) continue;
    std::printf("FAILED: no %s with terms by %s\n", direction.c_str(), family.c_str());
    ++failed;
  }
  for (const auto& [family, direction] : TermKernelsOf(TermFamily(arguments))) {
    if (direction == "probabilities") continue;  // its tensors are sharded by queries
    const int calls = splits.CallsOf(family, direction + kByKeys);
    std::printf("%d calls of %s%s by %s\n", calls, direction.c_str(), kByKeys, family.c_str());
    if (arguments.cases < kCasesByKeys || calls > 0) continue;
    std::printf("FAILED: no %s%s by %s\n", direction.c_str(), kByKeys, family.c_str());
    ++failed;
  }
  return failed;
}

// Checks only forwards: the backward of these cases has the inputs without rounding, which is
// another problem.
int CheckFloat8Cases(const Arguments& arguments, const DeviceInfo& device) {
  SplitCounts splits;
  int failed =
      Judge(DrawCases(arguments, RandomFloat8Case), device, "in e4m3", GivesTheSame, splits);
  const int64_t calls = splits.CallsOf("sm90/fp8", "forward");
  std::printf("%ld calls in e4m3\n", static_cast<long>(calls));
  if (arguments.cases > 0 && calls == 0) {
    std::printf("FAILED: no forward in e4m3\n");
    ++failed;
  }
  return failed;
}

// Each forward must give the same bits twice.
int CheckWideCases(const Arguments& arguments, const DeviceInfo& device) {
  const auto repeats = [](const Case&, const CaseOutputs& first,
                          const std::function<CaseOutputs()>& run) {
    const CaseOutputs again = run();
    return again.out == first.out && again.lse == first.lse;
  };
  SplitCounts splits;
  int failed = Judge(DrawCases(arguments, RandomWideCase), device, "wide", repeats, splits);
  for (const char* direction : {"forward", "backward"}) {
    const int64_t calls = splits.CallsOf("sm90", direction);
    std::printf("%ld wide %ss by sm90\n", static_cast<long>(calls), direction);
    if (arguments.cases < 10 || calls > 0) continue;
    std::printf("FAILED: no wide %s by sm90\n", direction);
    ++failed;
  }
  return failed;
}

// Work on a separate stream while the object exists. It delays blocks of other kernels, which must
// not change their results.
class OtherWork {
 public:
  OtherWork() : buffer_(kBytes) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    for (int i = 0; i < kLaunches; ++i)
      Check(StartZero({buffer_.get(), kBytes / (1 + i % 7)}, stream_));
  }
  ~OtherWork() {
    (void)cudaStreamSynchronize(stream_);
    (void)cudaStreamDestroy(stream_);
  }
  OtherWork(const OtherWork&) = delete;
  OtherWork& operator=(const OtherWork&) = delete;

 private:
  static constexpr int64_t kBytes = 64 << 20;
  static constexpr int kLaunches = 100;
  Buffer buffer_;
  cudaStream_t stream_ = nullptr;
};

// `kind` describes the drawn problems.
int CheckDeterministicCases(const Arguments& arguments, const DeviceInfo& device, Draw draw,
                            const char* kind) {
  const auto repeats = [](const Case& c, const CaseOutputs& first,
                          const std::function<CaseOutputs()>& again) {
    const OtherWork other;
    return GivesTheSame(c, first, again);
  };
  SplitCounts splits;
  int failed = Judge(DrawCases(arguments, draw), device, "deterministic", repeats, splits);
  const int64_t calls = splits.CallsOf("sm90", "backward");
  std::printf("%ld deterministic %s backwards by sm90\n", static_cast<long>(calls), kind);
  if (arguments.cases > 0 && calls == 0) {
    std::printf("FAILED: no deterministic %s backward by sm90\n", kind);
    ++failed;
  }
  return failed;
}

int CheckDeterministicCases(const Arguments& arguments, const DeviceInfo& device) {
  return CheckDeterministicCases(arguments, device, RandomDeterministicCase, "plain") +
         CheckDeterministicCases(arguments, device, RandomDeterministicTermCase, "term");
}

int Main(int argc, char** argv) {
  const Arguments arguments = Parse(argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // an interrupted run has printed its lines
  const auto device = QueryDevice(0);
  Check(device.status());
  Check(CheckFamily(arguments.family));
  Check(LoadKernels(*device));
  std::printf("seed %u, %d cases\n", arguments.seed, arguments.cases);
  if (arguments.fp8) {
    const int fp8_failed = CheckFloat8Cases(arguments, *device);
    std::printf("%d cases, %d failed\n", arguments.cases, fp8_failed);
    return fp8_failed == 0 ? 0 : 1;
  }
  if (arguments.deterministic) {
    const int deterministic_failed = CheckDeterministicCases(arguments, *device);
    std::printf("%d cases, %d failed\n", arguments.cases, deterministic_failed);
    return deterministic_failed == 0 ? 0 : 1;
  }
  if (arguments.wide) {
    const int wide_failed = CheckWideCases(arguments, *device);
    std::printf("%d cases, %d failed\n", arguments.cases, wide_failed);
    if (!arguments.small) PrintWideSpeed(*device);
    return wide_failed == 0 ? 0 : 1;
  }
  int failed = arguments.small ? 0 : CheckKeepSets(*device, TermFamily(arguments));
  failed += CheckTermCases(arguments, *device);
  if (!arguments.small) PrintProbabilitySpeed(*device);
  if (arguments.terms) {
    if (!arguments.small) PrintTermSpeed(*device, arguments.family);
  } else {
    failed += CheckControls(*device);
    if (!arguments.small) failed += CheckHugeScores(*device);
    failed += CheckRandomCases(arguments, *device);
    if (device->compute_major == 9) {
      failed += CheckFloat8Cases(arguments, *device);
      failed += CheckDeterministicCases(arguments, *device);
      failed += CheckWideCases(arguments, *device);
    }
  }
  std::printf("%d cases, %d failed\n", arguments.cases, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ringattn::worker::cuda::check

int main(int argc, char** argv) { return ringattn::worker::cuda::check::Main(argc, argv); }
