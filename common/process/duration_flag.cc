#include "common/process/duration_flag.h"

#include "CLI/App.hpp"
#include "absl/strings/str_cat.h"

namespace ringattn {

void AddDuration(CLI::App* app, const std::string& name, absl::Duration* target,
                 const std::string& help) {
  app->add_option_function<std::string>(
         name,
         [name, target](const std::string& text) {
           absl::Duration value;
           if (!absl::ParseDuration(text, &value) || value <= absl::ZeroDuration() ||
               value == absl::InfiniteDuration()) {
             throw CLI::ValidationError(name,
                                        text + " is not a duration above 0, such as 500ms or 5s");
           }
           *target = value;
         },
         absl::StrCat(help, " [", absl::FormatDuration(*target), "]"))
      ->type_name("DURATION");
}

}  // namespace ringattn
