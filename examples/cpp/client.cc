// Calls Octavo: streams a chat, cancels a call, shows an error with its details.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "octavo/v1/inference.grpc.pb.h"
#include "rpc_status.pb.h"

namespace {

namespace pb = octavo::v1;
using Stub = pb::InferenceService::Stub;

constexpr char kUsage[] = "usage: client ADDRESS (chat QUESTION | cancel | error)\n";
// The server knows the deadline: a request past it is ended and its memory freed.
constexpr std::chrono::seconds kTimeout(120);
constexpr int kCancelAfterTokens = 5;

// A request with one question. Temperature 0: the same answer every time.
pb::GenerateRequest Ask(const std::string& question) {
  pb::GenerateRequest request;
  pb::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role(pb::CHAT_ROLE_USER);
  message->set_content(question);
  request.mutable_sampling()->set_temperature(0);
  return request;
}

std::string NameOf(const grpc::Status& status) { return google::rpc::Code_Name(static_cast<int>(status.error_code())); }

// What an error says, line by line. The details are absent where no server made it, as when none listens.
std::string Describe(const grpc::Status& status) {
  std::ostringstream text;
  text << "code " << NameOf(status) << "\nmessage " << status.error_message() << "\n";
  google::rpc::Status details;
  if (!details.ParseFromString(status.error_details())) return text.str();
  for (const google::protobuf::Any& packed : details.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad_request;
    google::rpc::RetryInfo retry;
    if (packed.UnpackTo(&info)) {
      text << "reason " << info.reason() << "\n";
    } else if (packed.UnpackTo(&bad_request)) {
      for (const auto& each : bad_request.field_violations()) {
        text << "field " << each.field() << ": " << each.description() << "\n";
      }
    } else if (packed.UnpackTo(&retry)) {
      const auto& delay = retry.retry_delay();
      text << "retry in " << static_cast<double>(delay.seconds()) + delay.nanos() / 1e9 << " s\n";
    }
  }
  return text.str();
}

// Prints an answer as it is generated.
grpc::Status Chat(Stub& stub, const std::string& question) {
  pb::GenerateRequest request = Ask(question);
  request.mutable_stopping()->set_max_tokens(256);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kTimeout);
  std::unique_ptr<grpc::ClientReader<pb::GenerateResponse>> reader = stub.Generate(&context, request);
  pb::GenerateResponse event;
  while (reader->Read(&event)) {
    if (event.has_delta()) {
      std::cout << event.delta().text() << std::flush;
    } else if (event.has_choice_finished()) {
      const pb::ChoiceFinished& finished = event.choice_finished();
      std::cout << std::endl;
      std::cerr << pb::FinishReason_Name(finished.reason()) << ", " << finished.completion_tokens() << " tokens\n";
    }
  }
  // Read only says that there is no more; Finish says why.
  return reader->Finish();
}

// Breaks an answer off that would otherwise go on until the model's context is full.
grpc::Status Cancel(Stub& stub) {
  pb::GenerateRequest request = Ask("Count from one to a thousand.");
  request.mutable_stopping()->set_ignore_eos(true);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kTimeout);
  std::unique_ptr<grpc::ClientReader<pb::GenerateResponse>> reader = stub.Generate(&context, request);
  pb::GenerateResponse event;
  int tokens = 0;
  while (reader->Read(&event)) {
    if (tokens >= kCancelAfterTokens) continue;  // what was on its way is read to the end, for Finish
    std::cout << event.delta().text() << std::flush;
    tokens += event.delta().token_ids_size();
    if (tokens >= kCancelAfterTokens) context.TryCancel();
  }
  grpc::Status status = reader->Finish();
  if (status.error_code() != grpc::StatusCode::CANCELLED) return status;
  std::cout << "\nbroken off after " << tokens << " tokens: " << NameOf(status) << "\n";
  return grpc::Status::OK;
}

// Sends a request with three bad fields and prints the refusal: all three are named at once.
grpc::Status ShowError(Stub& stub) {
  pb::GenerateRequest request = Ask("Is this request right?");
  request.mutable_sampling()->set_temperature(9);
  request.mutable_sampling()->set_top_p(0);
  request.set_n(0);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kTimeout);
  std::unique_ptr<grpc::ClientReader<pb::GenerateResponse>> reader = stub.Generate(&context, request);
  pb::GenerateResponse event;
  while (reader->Read(&event)) {
  }
  std::cout << Describe(reader->Finish());
  return grpc::Status::OK;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const std::string command = args.size() > 1 ? args[1] : "";
  const bool is_chat = command == "chat" && args.size() == 3;
  const bool is_other = (command == "cancel" || command == "error") && args.size() == 2;
  if (!is_chat && !is_other) {
    std::cerr << kUsage;
    return 2;
  }
  // One channel for the whole life of a program: it keeps the connection, and stubs are cheap.
  const auto channel = grpc::CreateChannel(args[0], grpc::InsecureChannelCredentials());
  const std::unique_ptr<Stub> stub = pb::InferenceService::NewStub(channel);
  const grpc::Status status = is_chat             ? Chat(*stub, args[2])
                              : command == "cancel" ? Cancel(*stub)
                                                    : ShowError(*stub);
  if (!status.ok()) {
    std::cerr << Describe(status);
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
