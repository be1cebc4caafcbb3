// Calls Octavo with its .proto files loaded at run time: streams a chat, cancels a call, shows an error with its details.

import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const USAGE = 'usage: node client.js ADDRESS (chat QUESTION | cancel | error)';
// The server knows the deadline: a request past it is ended and its memory freed.
const TIMEOUT_MS = 120_000;
const CANCEL_AFTER_TOKENS = 5;

const definition = protoLoader.loadSync(['octavo/v1/inference.proto', 'rpc_status.proto'], {
  includeDirs: ['../../protos', '..'].map((folder) => fileURLToPath(new URL(folder, import.meta.url))),
  longs: String, // a seed has 64 bits, more than a Number holds
  enums: String,
  defaults: true,
  oneofs: true, // event.event names the field that is set
});
const { InferenceService } = grpc.loadPackageDefinition(definition).octavo.v1;

async function main([address, command, question, ...rest]) {
  const usable = command === 'chat' ? question !== undefined : question === undefined;
  if (!usable || rest.length > 0 || !['chat', 'cancel', 'error'].includes(command)) {
    console.error(USAGE);
    return 2;
  }
  // One client for the whole life of a program: it keeps the connection.
  const client = new InferenceService(address, grpc.credentials.createInsecure());
  try {
    if (command === 'chat') await chat(client, question);
    else if (command === 'cancel') await cancel(client);
    else await showError(client);
    return 0;
  } catch (error) {
    if (!(error instanceof Error && 'metadata' in error)) throw error; // not a call's error
    console.error(describe(error));
    return 1;
  } finally {
    client.close();
  }
}

// Prints an answer as it is generated. The loop throws what the call's 'error' event carries.
async function chat(client, question) {
  const request = { ...ask(question), stopping: { maxTokens: 256 } };
  for await (const event of generate(client, request)) {
    if (event.event === 'delta') {
      process.stdout.write(event.delta.text);
    } else if (event.event === 'choiceFinished') {
      process.stdout.write('\n');
      console.error(`${event.choiceFinished.reason}, ${event.choiceFinished.completionTokens} tokens`);
    }
  }
}

// Breaks an answer off that would otherwise go on until the model's context is full.
async function cancel(client) {
  const call = generate(client, { ...ask('Count from one to a thousand.'), stopping: { ignoreEos: true } });
  let tokens = 0;
  try {
    for await (const event of call) {
      if (event.event !== 'delta' || tokens >= CANCEL_AFTER_TOKENS) continue;
      process.stdout.write(event.delta.text);
      tokens += event.delta.tokenIds.length;
      // A break alone would not do: the call would go on, and the server with it.
      if (tokens >= CANCEL_AFTER_TOKENS) call.cancel();
    }
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
    console.log(`\nbroken off after ${tokens} tokens: ${grpc.status[error.code]}`);
  }
}

// Sends a request with three bad fields and prints the refusal: all three are named at once.
async function showError(client) {
  const request = {
    ...ask('Is this request right?'),
    sampling: { temperature: 9, topP: 0 },
    n: 0,
  };
  try {
    for await (const _ of generate(client, request));
  } catch (error) {
    console.log(describe(error));
  }
}

function generate(client, request) {
  return client.generate(request, { deadline: Date.now() + TIMEOUT_MS });
}

// A request with one question. Temperature 0: the same answer every time.
function ask(question) {
  return {
    chat: { messages: [{ role: 'CHAT_ROLE_USER', content: question }] },
    sampling: { temperature: 0 },
  };
}

// What an error says, line by line. The details are absent where no server made it, as when none listens.
function describe(error) {
  const lines = [`code ${grpc.status[error.code]}`, `message ${error.details}`];
  for (const { type, detail } of detailsOf(error)) {
    if (type === 'google.rpc.ErrorInfo') {
      lines.push(`reason ${detail.reason}`);
    } else if (type === 'google.rpc.BadRequest') {
      for (const { field, description } of detail.fieldViolations) lines.push(`field ${field}: ${description}`);
    } else if (type === 'google.rpc.RetryInfo') {
      lines.push(`retry in ${Number(detail.retryDelay.seconds) + detail.retryDelay.nanos / 1e9} s`);
    }
  }
  return lines.join('\n');
}

// The trailer grpc-status-details-bin holds a google.rpc.Status, whose details are messages packed with their types.
function* detailsOf(error) {
  for (const trailer of error.metadata.get('grpc-status-details-bin')) {
    for (const packed of definition['google.rpc.Status'].deserialize(trailer).details) {
      const type = packed.type_url.split('/').pop();
      if (type in definition) yield { type, detail: definition[type].deserialize(packed.value) };
    }
  }
}

process.exitCode = await main(process.argv.slice(2));
