#include "common/process/duration_flag.h"

#include "CLI/App.hpp"
#include "absl/strings/str_cat.h"

namespace ringattn {

namespace {

void AddOption(CLI::App* app, const std::string& name, absl::Duration* target,
               const std::string& help, bool may_be_zero) {
  app->add_option_function<std::string>(
         name,
         [name, target, may_be_zero](const std::string& text) {
           absl::Duration value;
           const bool parsed = absl::ParseDuration(text, &value);
           const bool fits = value > absl::ZeroDuration() && value < absl::InfiniteDuration();
           if (!parsed || !(fits || (may_be_zero && value == absl::ZeroDuration()))) {
             throw CLI::ValidationError(name,
                                        absl::StrCat(text, " is not ", may_be_zero ? "0 or " : "",
                                                     "a duration above 0, such as 500ms or 5s"));
           }
           *target = value;
         },
         absl::StrCat(help, " [", absl::FormatDuration(*target), "]"))
      ->type_name("DURATION");
}

}  // namespace

void AddDuration(CLI::App* app, const std::string& name, absl::Duration* target,
                 const std::string& help) {
  AddOption(app, name, target, help, /*may_be_zero=*/false);
}

void AddDurationOrZero(CLI::App* app, const std::string& name, absl::Duration* target,
                       const std::string& help) {
  AddOption(app, name, target, help, /*may_be_zero=*/true);
}

}  // namespace ringattn
