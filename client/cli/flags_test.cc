#include "client/cli/flags.h"
#include "client/cli/flag_set.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/api/error.h"
#include "gtest/gtest.h"

namespace ringattn::client::cli {
namespace {

// Parses a command line of shape and option flags. Returns the problem or the error.
absl::StatusOr<Problem> Parse(const std::string& line) {
  FlagSet command;
  ShapeFlags shape;
  OptionFlags options;
  shape.AddTo(command);
  options.AddTo(command);
  if (absl::Status status = command.ParseText(line); !status.ok()) {
    return absl::OutOfRangeError(status.message());
  }
  Problem problem;
  if (absl::Status status = shape.Apply(&problem); !status.ok()) return status;
  if (absl::Status status = options.Apply(&problem); !status.ok()) return status;
  return problem;
}

TEST(Flags, UnsetIsNotZero) {
  const auto problem = Parse("--seq_len=8");
  ASSERT_TRUE(problem.ok());
  EXPECT_FALSE(problem->options.has_softmax_scale());
  EXPECT_FALSE(problem->options.has_softcap());
  EXPECT_FALSE(problem->options.has_window());
  EXPECT_FALSE(problem->plan.has_world_size());
  EXPECT_EQ(problem->plan.layout(), v1::LAYOUT_UNSPECIFIED);
  EXPECT_EQ(problem->shape.seq_len_kv(), 8u);
  const auto zero = Parse("--seq_len=8 --softcap=0 --world_size=0 --window=0,0");
  ASSERT_TRUE(zero.ok());
  EXPECT_TRUE(zero->options.has_softcap());
  EXPECT_TRUE(zero->plan.has_world_size());
  EXPECT_TRUE(zero->options.has_window());
  const auto one = Parse("--seq_len=8 --window=3");
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->options.window().left(), 3);
  EXPECT_EQ(one->options.window().right(), 3);
}

TEST(Flags, TuningAndMembersAreParsed) {
  const auto problem = Parse("--seq_len=8 --tile_q=96 --tile_kv=0 --key_splits=2 --members=b,a,c");
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->plan.tuning().tile_q(), 96u);
  EXPECT_TRUE(problem->plan.tuning().has_tile_kv());  // the server's rules reject it
  EXPECT_EQ(problem->plan.tuning().key_splits(), 2u);
  EXPECT_EQ(
      std::vector<std::string>(problem->plan.members().begin(), problem->plan.members().end()),
      (std::vector<std::string>{"b", "a", "c"}));
  EXPECT_FALSE(Parse("--seq_len=8")->plan.has_tuning());
  EXPECT_FALSE(Parse("--seq_len=8 --tile_q=-1").ok());
}

TEST(Flags, ProbabilityRowsAndLseFormatsAreParsed) {
  FlagSet command;
  std::vector<v1::ProbabilityRow> rows;
  v1::LseFormat format = v1::LSE_FORMAT_UNSPECIFIED;
  AddProbabilitiesFlag(command, &rows);
  AddLseFlag(command, &format);
  ASSERT_TRUE(command.ParseText("--probabilities=1:7,0:12 --lse=per_document").ok());
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].batch(), 1u);
  EXPECT_EQ(rows[0].position(), 7u);
  EXPECT_EQ(rows[1].position(), 12u);
  EXPECT_EQ(format, v1::LSE_FORMAT_PER_DOCUMENT);
  for (const char* wrong : {"--probabilities=1", "--probabilities=1:x", "--probabilities=-1:2",
                            "--probabilities=1:2:3", "--lse=other"}) {
    EXPECT_FALSE(command.ParseText(wrong).ok()) << wrong;
  }
}

TEST(Flags, AllFlagsAreParsed) {
  const auto problem = Parse(
      "--batch=2 --seq_len=10 --seq_len_kv=12 --heads=8 --kv_heads=2 --head_dim=32 "
      "--head_dim_v=16 --dtype=fp16 --causal --window=-1,4 --softmax_scale=0.5 --softcap=-1 "
      "--layout=striped --stripe=3 --schedule=ring --world_size=4");
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->shape.batch(), 2u);
  EXPECT_EQ(problem->shape.seq_len_kv(), 12u);
  EXPECT_EQ(problem->shape.num_kv_heads(), 2u);
  EXPECT_EQ(problem->shape.head_dim_v(), 16u);
  EXPECT_EQ(problem->dtype, v1::DATA_TYPE_FLOAT16);
  EXPECT_TRUE(problem->options.causal());
  EXPECT_EQ(problem->options.window().left(), -1);
  EXPECT_EQ(problem->options.window().right(), 4);
  EXPECT_EQ(problem->options.softcap(), -1);
  EXPECT_EQ(problem->plan.layout(), v1::LAYOUT_STRIPED);
  EXPECT_EQ(problem->plan.stripe(), 3u);
  EXPECT_EQ(problem->plan.schedule(), v1::SCHEDULE_RING);
  EXPECT_EQ(problem->plan.world_size(), 4u);
}

TEST(Flags, EverySchedule) {
  const std::pair<const char*, v1::Schedule> schedules[] = {
      {"auto", v1::SCHEDULE_UNSPECIFIED},
      {"single", v1::SCHEDULE_SINGLE},
      {"ring", v1::SCHEDULE_RING},
      {"all_gather", v1::SCHEDULE_ALL_GATHER},
      {"pass_q", v1::SCHEDULE_PASS_Q},
      {"replicated_q", v1::SCHEDULE_REPLICATED_Q},
      {"double_ring", v1::SCHEDULE_DOUBLE_RING}};
  for (const auto& [name, schedule] : schedules) {
    const auto problem = Parse(std::string("--seq_len=10 --schedule=") + name);
    ASSERT_TRUE(problem.ok()) << problem.status();
    EXPECT_EQ(problem->plan.schedule(), schedule);
    EXPECT_FALSE(problem->plan.has_heads_per_step());
  }
  const auto groups = Parse("--seq_len=10 --schedule=all_gather --heads_per_step=2");
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_EQ(groups->plan.heads_per_step(), 2u);
}

TEST(Flags, DilatedLevels) {
  const auto all = Parse("--seq_len=10 --heads=4 --dilation=8:2,16:4:3");
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->options.dilation_levels_size(), 2);
  EXPECT_EQ(all->options.dilation_levels(0).ShortDebugString(),
            "segment_length: 8 dilation_rate: 2");
  EXPECT_EQ(all->options.dilation_levels(1).ShortDebugString(),
            "segment_length: 16 dilation_rate: 4 offset: 3");
  // Five heads for three levels, with offsets by the level's number.
  const auto split = Parse("--seq_len=10 --heads=5 --dilation=2:1,4:2,8:2 --dilation_heads=split");
  ASSERT_TRUE(split.ok()) << split.status();
  ASSERT_EQ(split->options.dilation_levels_size(), 3);
  EXPECT_EQ(split->options.dilation_levels(0).ShortDebugString(),
            "segment_length: 2 dilation_rate: 1 offset: 0 head_begin: 0 head_end: 1");
  EXPECT_EQ(split->options.dilation_levels(1).ShortDebugString(),
            "segment_length: 4 dilation_rate: 2 offset: 1 head_begin: 1 head_end: 3");
  EXPECT_EQ(split->options.dilation_levels(2).ShortDebugString(),
            "segment_length: 8 dilation_rate: 2 offset: 0 head_begin: 3 head_end: 5");
  for (const std::string line :
       {"--dilation=8", "--dilation=8:", "--dilation=8:2:1:1", "--dilation=a:2",
        "--dilation_heads=split", "--heads=2 --dilation=8:2:1 --dilation_heads=split",
        "--heads=1 --dilation=8:2,16:2 --dilation_heads=split"}) {
    EXPECT_FALSE(Parse("--seq_len=10 " + line).ok()) << line;
  }
}

TEST(Flags, DocumentsBecomeCumulativeLengths) {
  const auto problem = Parse("--documents=3,0,5 --documents_kv=1,2,3");
  ASSERT_TRUE(problem.ok()) << problem.status();
  EXPECT_EQ(problem->shape.seq_len_q(), 8u);
  EXPECT_EQ(problem->shape.seq_len_kv(), 6u);
  EXPECT_EQ(std::vector<uint64_t>(problem->shape.packed().cu_seqlens_q().begin(),
                                  problem->shape.packed().cu_seqlens_q().end()),
            (std::vector<uint64_t>{0, 3, 3, 8}));
  EXPECT_EQ(problem->shape.packed().cu_seqlens_k(3), 6u);
}

TEST(Flags, WrongValuesAreNamed) {
  for (const std::string line :
       {"--seq_len=8 --window=3,", "--seq_len=8 --window=a,b", "--seq_len=8 --window=1,2,3",
        "--heads=2", "--seq_len=9 --documents=3,5", "--documents_kv=3 --seq_len=3",
        "--documents=18446744073709551615,1"}) {
    EXPECT_EQ(Parse(line).status().code(), absl::StatusCode::kInvalidArgument) << line;
  }
  for (const std::string line :
       {"--seq_len=-1", "--seq_len=x", "--seq_len=8 --dtype=fp8", "--seq_len=8 --layout=ring",
        "--seq_len=8 --schedule=both", "--seq_len=8 --unknown=1"}) {
    EXPECT_EQ(Parse(line).status().code(), absl::StatusCode::kOutOfRange) << line;
  }
}

TEST(Flags, ErrorsStateWhatIsAccepted) {
  const auto error = [](const std::string& flag) {
    return std::string(Parse("--seq_len=8 " + flag).status().message());
  };
  EXPECT_EQ(error("--softcap=hard"), "--softcap: is hard, must be a number");
  EXPECT_EQ(error("--softcap=nan"), "--softcap: is nan, must be a finite number");
  EXPECT_EQ(error("--heads=1.5"), "--heads: is 1.5, must be a whole number");
  EXPECT_EQ(error("--world_size=-5"), "--world_size: is -5; must not be negative");
  EXPECT_EQ(error("--documents=3,-5"), "--documents: is -5; must not be negative");
  EXPECT_EQ(error("--documents=3,x,5"), "--documents: is x, must be a whole number");
  EXPECT_EQ(error("--causal=maybe"), "--causal: is maybe, must be true or false");
  EXPECT_EQ(error("--schedule=foo"),
            "--schedule: foo not in {auto,single,ring,all_gather,pass_q,replicated_q,double_ring}");
  const auto on = Parse("--seq_len=8 --causal=true --softcap=2.5 --documents=3,5");
  EXPECT_TRUE(on.ok()) << on.status();
}

// Returns the exit code and what FlagSet::Parse writes to stderr.
std::pair<int, std::string> RunProgram(std::vector<std::string> arguments) {
  FlagSet program("program", "help", "1.0");
  program.AddCommand("forward", "Attention");
  FlagSet& cache = program.AddCommand("cache", "Caches");
  cache.AddCommand("list", "List");
  cache.AddCommand("delete", "Delete");
  cache.RequireCommand();
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  ::testing::internal::CaptureStderr();
  const std::optional<int> code = program.Parse(static_cast<int>(argv.size()), argv.data());
  std::string text = ::testing::internal::GetCapturedStderr();
  return {code.value_or(0), text.substr(0, text.find('\n'))};
}

TEST(Flags, AWrongCommandIsNamedAndTheCommandsAreListed) {
  EXPECT_EQ(RunProgram({"forward"}).first, 0);
  EXPECT_EQ(RunProgram({"cache", "list"}).first, 0);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"foo"}, "foo is not a command; use one of forward, cache"},
      {{}, "no command is given; use one of forward, cache"},
      {{"--foo"}, "no command is given; use one of forward, cache"},
      {{"cache", "foo"}, "foo is not a command; use one of list, delete"},
      {{"cache"}, "no command is given; use one of list, delete"},
  };
  for (const auto& [arguments, text] : cases) {
    const auto [code, error] = RunProgram(arguments);
    EXPECT_NE(code, 0);
    EXPECT_EQ(error, text);
  }
}

TEST(Flags, LocalValidationGivesTheServersViolations) {
  const auto problem = Parse("--seq_len=8 --softcap=-1 --head_dim=600");
  ASSERT_TRUE(problem.ok());
  const auto valid = ValidateLocally(*problem, Direction::kForward, false);
  EXPECT_EQ(valid.status().code(), absl::StatusCode::kInvalidArgument);
  std::vector<std::string> fields;
  for (const FieldViolation& violation : DetailsOf(valid.status()).violations) {
    fields.push_back(violation.field);
  }
  EXPECT_NE(std::find(fields.begin(), fields.end(), "options.softcap"), fields.end());
  EXPECT_NE(std::find(fields.begin(), fields.end(), "shape.head_dim"), fields.end());
}

}  // namespace
}  // namespace ringattn::client::cli
