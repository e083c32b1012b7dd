# Sidekiq: `ruby sidekiq_tasks.rb setup | client | worker`. The same as __main__.py and handler.py say.
require "json"
require "sidekiq"

SETTINGS = JSON.parse(ENV.fetch("BENCH_SETTINGS", "{}"))
WORK_SECONDS = Float(ENV.fetch("BENCH_WORK", "0.001"))
TEXT = "x" * 160
PACE_SECONDS = 0.05

ENV["REDIS_URL"] = ENV.fetch("BENCH_BROKER")
Sidekiq.logger.level = Logger::WARN

# The count of this process, in a file of eight bytes.
module Ran
  LOCK = Mutex.new
  OWN = "#{ENV.fetch("BENCH_WORKER", "0")}-#{Process.pid}"
  FOLDER = ENV.fetch("BENCH_FOLDER", ".")
  @count = 0

  def self.now = Process.clock_gettime(Process::CLOCK_MONOTONIC)

  def self.add(number)
    began = now
    LOCK.synchronize do
      if @file.nil?
        @file = File.open("#{FOLDER}/count-#{OWN}", "wb")
        @starts = File.open("#{FOLDER}/starts-#{OWN}", "ab") if ENV["BENCH_STARTS"] == "1"
      end
      @file.pwrite([@count += 1].pack("q<"), 0)
      @starts.syswrite("#{number} #{began}\n") if @starts && number >= 0
    end
  end
end

class Noop
  include Sidekiq::Worker
  sidekiq_options queue: "bench"
  def perform(number) = Ran.add(number)
end

class Application
  include Sidekiq::Worker
  sidekiq_options queue: "bench"
  def perform(number, _text)
    Ran.add(number)
    sleep WORK_SECONDS
  end
end

class Elsewhere # no worker serves its queue
  include Sidekiq::Worker
  sidekiq_options queue: "elsewhere"
  def perform(_number) = nil
end

TASKS = { "noop" => Noop, "application" => Application, "elsewhere" => Elsewhere }.freeze

class Client
  def serve
    say({ ready: true })
    while (line = $stdin.gets)
      message = JSON.parse(line, symbolize_names: true)
      say(public_send(message.delete(:do), **message))
    end
  end

  def one(task:, n:)
    timed { |_| n.times { |number| push(task, number) } && n }
  end

  def many(task:, n:, first: 0)
    timed { |_| bulk(task, (first...first + n).map { |number| arguments(task, number) }) && n }
  end

  def produce(task:, seconds:)
    timed do |begun|
      n = 0
      (push(task, n); n += 1) while Ran.now - begun < seconds
      n
    end
  end

  def pace(task:, rate:, seconds:)
    events = (0...[1, (rate * seconds).round].max).map do |number|
      sleep((0.5 + rand) / rate)
      push(task, number)
      [number, Ran.now]
    end
    { events: }
  end

  def flow(task:, rate:, seconds:)
    timed do |begun|
      n = 0
      while (passed = Ran.now - begun) < seconds
        due = (rate * (passed + PACE_SECONDS)).floor - n
        if due.positive?
          bulk(task, [arguments(task, -1)] * due)
          n += due
        end
        sleep([0, (n / rate) - (Ran.now - begun)].max)
      end
      n
    end
  end

  private

  def timed
    begun = Ran.now
    jobs = yield begun
    { jobs:, seconds: Ran.now - begun }
  end

  def arguments(task, number) = task == "application" ? [number, TEXT] : [number]
  def push(task, number) = TASKS.fetch(task).perform_async(*arguments(task, number))

  def bulk(task, jobs)
    jobs.each_slice(SETTINGS["bulk"]) { |batch| Sidekiq::Client.push_bulk("class" => TASKS.fetch(task), "args" => batch) }
  end

  def say(answer)
    $stdout.puts(JSON.generate(answer))
    $stdout.flush
  end
end

if $PROGRAM_NAME == __FILE__
  case ARGV.first
  when "client" then Client.new.serve
  when "worker"
    exec("sidekiq", "-r", __FILE__, "-q", "bench", "-c", SETTINGS["concurrency"].to_s, "-e", "production")
  end
end
